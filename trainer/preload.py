"""What workers of `trainer launch` find imported; see `trainer.launcher`."""

from trainer.quiet import quiet_libraries

quiet_libraries()  # before torch is imported

import trainer.train  # noqa: E402, F401
