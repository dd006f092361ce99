"""Write the defaults of transformers' config classes, which `kvreclaim plan` reads without transformers.

python scripts/plan_defaults.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from kvreclaim.plan.families import COMPOSITE, DEFAULTS_FILE, FAMILIES, OTHER_NAMES


def main() -> None:
    lines = (f" {json.dumps(kind)}: {json.dumps(found)}" for kind, found in all_defaults().items())
    DEFAULTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def all_defaults() -> dict[str, dict[str, Any]]:
    """By model_type; of a composite one also those of its language model, where no config of it is given."""
    found = {kind: _of_class(CONFIG_MAPPING[kind]) for kind in FAMILIES}
    for kind, part in COMPOSITE.items():
        made = CONFIG_MAPPING[kind]
        found[kind] = _numbers(made.default_config_fields())
        found[kind][part.key] = _numbers(made.sub_configs_defaults[part.key].init_kwargs)
    return found


def _of_class(made: type[PreTrainedConfig]) -> dict[str, Any]:
    """Its defaults, and other names that it has for fields."""
    numbers = _numbers(made.default_config_fields())
    return numbers | ({OTHER_NAMES: made.attribute_map} if made.attribute_map else {})


def _numbers(fields: Mapping[str, Any]) -> dict[str, int | None]:
    """A class's own whole numbers, switches and nothings, ids of tokens apart."""
    general = PreTrainedConfig.default_config_fields()
    return {
        key: value
        for key, value in fields.items()
        if isinstance(value, int | None)
        and (key not in general or key == "tie_word_embeddings")
        and "token_i" not in key
    }


if __name__ == "__main__":
    main()
