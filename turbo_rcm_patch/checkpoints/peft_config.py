"""PEFT's configuration of a LoRA, LoKr or LoHa, from all places where trainers write it: the strength of its matrices.

    header "lora_adapter_metadata"   diffusers' savers; a pipeline's saver puts "transformer." before each field
    header "lora_config"             finetrainers
    adapter_config.json              PEFT; a file of its own beside the matrices (files.py adds it to the header)

Kohya's "ss_network_alpha" is not read: musubi-tuner keeps it in the header after it multiplied the matrices by it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping

PEFT_FILE = "adapter_config.json"
_PLACES = ("lora_adapter_metadata", "lora_config", PEFT_FILE)
_COMPONENT = re.compile(r"^transformer(_2)?\.")

_NUMBERS = ("lora_alpha", "r")
_LYCORIS = ("LOKR", "LOHA")  # kinds whose alpha is the field "alpha"
_PATTERNS = ("alpha_pattern", "rank_pattern")
# Other fields that change the result, and the values for which it is the plain product of two matrices.
_PLAIN = {
    "peft_type": (None, "LORA", *_LYCORIS),
    "bias": (None, "none"),
    # The other initialisations also change the model's own weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    "use_rslora": (None, False, True),
    **dict.fromkeys(
        (
            *("use_dora", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
            *("alora_invocation_tokens", "layer_replication", "modules_to_save", "target_parameters"),
            "trainable_token_indices",
        ),
        (None, False, [], {}),
    ),
}
# Fields that say what was trained and how, but not how to compute with it. PEFT ignores fan_in_fan_out for a linear,
# and the biases of lora_bias are in the file.
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("lora_dropout", "fan_in_fan_out", "lora_bias", "megatron_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights"),  # of LoKr and LoHa, as the next two
    *("use_effective_conv2d", "decompose_both", "decompose_factor"),
}


class PeftConfig:
    """The configuration in a file's metadata, which is empty for most files.

    unknown: the settings that this version does not know, and so cannot obey, each with its place.

    Raises ValueError for a configuration that cannot be read, and for fields that ask for more than the product of two
    matrices.
    """

    def __init__(self, metadata: Mapping[str, str]):
        place = next((place for place in _PLACES if metadata.get(place)), None)
        self._place = place
        self._fields = {} if place is None else _fields(place, metadata[place])
        for name, accepted in _PLAIN.items():
            value = self._fields.get(name)
            if not any(value is plain or value == plain for plain in accepted):
                raise ValueError(
                    f"{place} has {name}={json.dumps(value)}, which is not supported; merge the LoRA into its model "
                    "with the tool that trained it, and load that model"
                )
        self._numbers = ("alpha", "r") if self._fields.get("peft_type") in _LYCORIS else _NUMBERS
        known = {*self._numbers, *_PATTERNS, *_PLAIN, *_WITHOUT_EFFECT}
        self.unknown = [f"{place}: {name}" for name, value in self._fields.items() if name not in known and value]

    def scale(self, names: Iterable[str], rank: int | None) -> float | None:
        """Return the strength of a module's matrices: alpha/rank, or alpha/√rank with rsLoRA. None without any alpha.

        names: the module's name in all spellings that patterns may use. rank: the rank of its matrices. A LoKr of whole
        matrices has none; PEFT then takes the configuration's.

        Raises ValueError if the configuration tells another rank, or an alpha or a rank that is no finite number.
        """
        names = list(names)
        alpha, told = (self._of(names, *fields) for fields in zip(_PATTERNS, self._numbers, strict=True))
        rank = told if rank is None else rank
        if alpha is None or not rank:
            return None
        if told is not None and told != rank:
            raise ValueError(
                f"{self._place} tells rank {told:g} for {names[0]}, but its matrices have rank {rank}; use the "
                f"configuration that was saved with these matrices"
            )
        return alpha / (math.sqrt(rank) if self._fields.get("use_rslora") else rank)

    def _of(self, names: list[str], pattern: str, default: str) -> float | None:
        try:
            patterns = (self._fields.get(pattern) or {}).items()
            found = (value for end, value in patterns if any(_matches(end, name) for name in names))
            value = next(found, self._fields.get(default))
            if value is None or math.isfinite(value):
                return value
        except (AttributeError, TypeError, OverflowError, re.error):  # no table, no number, no pattern
            pass
        raise ValueError(f"{self._place} has an alpha or a rank that is no number; download the file again")


def _fields(place: str, text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"its {place} cannot be read as a JSON table; download the file again")
    prefixed = {_COMPONENT.sub("", name): value for name, value in found.items() if _COMPONENT.match(name)}
    return prefixed or {name: value for name, value in found.items() if "." not in name}


def _matches(end: str, name: str) -> bool:
    """True if a pattern of PEFT is for the module of this name: the pattern matches its last parts."""
    return re.match(rf"(.*\.)?({end})$", name) is not None
