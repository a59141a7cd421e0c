"""Imported first by the fork server of `trainer launch`, so that it imports without garbage collections.

Half a million objects come to stay, and looking through them for garbage, again and again, is a quarter
of the time that importing torch and torchrec takes. Workers collect (`trainer.launcher.work`).
"""

import gc

gc.disable()
