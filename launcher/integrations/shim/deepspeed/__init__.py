"""Not DeepSpeed, but DeepSpeed's names on launcher's engine.

On sys.path in programs started by `launch`, after `enable()`, and where `launch shim` installs it."""

from launcher.integrations import surface

__version__ = surface.VERSION
__launcher__ = True
__getattr__ = surface.serve()
surface.tell()
