"""The contracts of the stages, one file each: equations, outputs, plain jnp form, ``STAGE``."""

import importlib
import pkgutil

from mlstm_pallas.stage import Stage


def _stages() -> dict[str, Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    stages = [module.STAGE for module in modules if hasattr(module, "STAGE")]
    return {
        stage.name: stage
        for stage in sorted(stages, key=lambda stage: (stage.decode, stage.backward))
    }


STAGES = _stages()
