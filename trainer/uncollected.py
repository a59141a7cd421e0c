"""Imported first by the fork server of `trainer launch`: it looks for no garbage, and ends with its launcher.

Half a million objects come to stay, and looking through them for garbage, again and again, is a quarter
of the time that importing torch and torchrec takes. Workers collect (`trainer.launcher.work`), and end with
the fork server.
"""

import gc

from trainer.tied import end_with_parent

gc.disable()
end_with_parent()
