"""The command `kvasir`; begin reading at `main.py`."""
