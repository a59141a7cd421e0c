"""Workers of `trainer launch`: forks of a process that stands right before its program, with imports made.

`client` is the launcher's side. It starts `python -u [-m] program arguments...`, the very command of a
worker, with the folder `site` on the path: Python runs `site/sitecustomize.py` before it looks at the
program. There `serve` imports what workers need, and forks. Each fork goes on into its program as Python
does it, so that nothing of that is imitated: arguments, `__main__`, streams, hooks, threads at the end, exit
codes. docs/design/0009-forked-workers.md says what a fork has otherwise than a fresh process.
"""
