"""The contracts of the stages, one file each: equations, operands, outputs, plain jnp form."""

import importlib
import pkgutil

from mlstm_pallas.stage import Stage


def _stages() -> list[Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    stages = [module.STAGE for module in modules if hasattr(module, "STAGE")]
    return sorted(stages, key=lambda stage: (stage.decode, stage.backward))


STAGES = {stage.name: stage for stage in _stages() if not stage.helper}
HELPERS = {stage.name: stage for stage in _stages() if stage.helper}
