"""The stages, one file each: docstring, outputs, kernel, launcher, plain jnp form, facts.

A file with a ``STAGE`` is all that a new stage takes, and its call in a schedule.
"""

import importlib
import pkgutil

from mlstm_pallas.stage import Stage


def _found() -> dict[str, Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    stages = [module.STAGE for module in modules if hasattr(module, "STAGE")]
    return {
        stage.name: stage
        for stage in sorted(stages, key=lambda stage: (stage.decode, stage.backward))
    }


STAGES = _found()
