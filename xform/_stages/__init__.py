"""Models cut into the stages of a pipeline."""

from xform._stages._stages import Stages as Stages
from xform._stages._stages import stages as stages
