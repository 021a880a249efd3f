"""What users hold: `load`, `Model`, `Stream`. Imports the engine; `import kvasir` does not import this until used."""

from kvasir.service.model import Model, load
from kvasir.service.stream import Stream

__all__ = ["Model", "Stream", "load"]
