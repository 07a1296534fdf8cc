"""patch and restore: check everything, then change. After any failure all changes are undone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable

import torch

from ..checkpoints.files import COMPONENTS
from ..config import BlockSparse, Exact, PatchConfig, Sparse, resolve_config
from ..versions import warn_of_untested
from ..wording import with_article
from .errors import PatchError
from .families import SUPPORTED, check_supported, family_of
from .families import vae as vae_family
from .families.family import Binding, graph_of
from .families.graphs import TransformerGraphs
from .families.vae.video_output import patch_video_output, video_output_note
from .journal import Journal
from .other_threads import no_other_calls
from .restoring import Handle, check_restorable
from .sampling.step_count import Steps, why_not_countable
from .steps.block_sparse import why_trained_otherwise
from .steps.plan import SHARED
from .steps.sparse_linear import SelfAttentions, use_processors, why_not_replaceable, why_not_sparse
from .summary import Row, Section, as_text, plan_rows, transformer_section, unknown_line, vae_rows, vae_section
from .weights.group_offload import ON_DISK, is_on_disk, update_groups
from .weights.quantize_linears import convert_weights, convertible_linears, free_originals, refuse_written_weights

logger = logging.getLogger(__name__)

RESTORED = "restored: nothing is patched any more"
_JOURNAL = "_turbo_rcm_patch_journal"  # the attribute of a patched model that holds its Journal


# For each tier a function of a model's name and self-attentions: the reason why it cannot be patched, or None.
_REFUSALS = {Sparse: why_not_sparse, BlockSparse: why_trained_otherwise}


class Patch(Handle):
    """A patch of one or more models: its summary, and how to undo it. It is a context manager that restores on exit.

    Attributes:
        config: the configuration.
        transformers: the patched models by their name in the pipeline.
        vae: the VAE that is patched, or that `patch` left unpatched for a reason. None if there is no VAE.
        unknown: a pipeline's transformers by name, if no family knows them and only its VAE is patched.
    """

    def __init__(
        self,
        transformers: dict[str, torch.nn.Module],
        config: PatchConfig,
        target: object,
        vae: torch.nn.Module | None = None,
        unknown: dict[str, torch.nn.Module] | None = None,
    ):
        self.transformers = transformers
        self.config = config
        self.vae = vae
        self.unknown = unknown or {}
        self._target = weakref.ref(target)

    @property
    def active(self) -> bool:
        """True if any of the models is still patched."""
        return bool(self._patched())

    @property
    def graph_memory(self) -> int:
        """GPU memory in bytes that only the CUDA graphs of the patched models can use, or 0 if it is unknown."""
        return sum(graph.reserved_bytes or 0 for graph in self._graphs())

    @property
    def graph_count(self) -> int:
        """The number of CUDA graphs of the patched models."""
        return sum(graph.kept for graph in self._graphs())

    def summary(self) -> str:
        """Return tables of the blocks' steps in their present state: the kernel of each, or why it is not fused.

        Notes below say how CUDA graphs are used. Raises PatchError after restore.
        """
        self._check_active("summarize")
        return as_text(self._sections())

    def __repr__(self) -> str:
        """Return the summary, or a sentence that the patch was restored."""
        return as_text(self._sections()) if self.active else RESTORED

    def _sections(self) -> list[Section]:
        patched = _only_patched(self.transformers).items()
        sections = [Section([(unknown_line(name, model), [])], []) for name, model in self.unknown.items()]
        sections += [self._placed(transformer_section(name, model), name, model) for name, model in patched]
        vae = self.vae if self.vae is not None else getattr(self._target(), "vae", None)
        if self.vae is not None or (isinstance(vae, torch.nn.Module) and vae_family.vae_state(vae) is not None):
            sections.append(self._placed(vae_section(vae, self.config), "vae", vae))
        note = video_output_note(self._target(), self.config)
        return sections if note is None else [*sections, Section([(note, [])], [])]

    def _placed(self, section: Section, name: str, model: torch.nn.Module) -> Section:
        """Return a model's section, with a note if the pipeline now has another model in its place."""
        now = getattr(self._target(), name, model)
        if model in (now, getattr(now, "_orig_mod", None)):
            return section
        return section._replace(notes=[f"no longer the pipeline's {name}", *section.notes])

    def rows(self) -> list[Row]:
        """Return the steps that `summary` shows, for all patched models. Raises PatchError after restore."""
        self._check_active("summarize")
        models = _only_patched(self.transformers).values()
        rows = [row for model in models for blocks in family_of(model).blocks for row in plan_rows(model, blocks)]
        return rows if self.vae is None else [*rows, *vae_rows(self.vae)]

    def restore(self) -> None:
        """Undo the patch on every model. A VAE that patched pipelines share is restored with the last of them.

        Raises PatchError if the patch was undone already, or if an unknown hook holds a patched forward.
        """
        self._check_active("restore")
        _restore(self._patched())

    def _patched(self) -> dict[str, torch.nn.Module]:
        """Return the models that `restore` undoes."""
        return _restorable(self.transformers | self.unknown, self.vae)

    def _graphs(self) -> list[TransformerGraphs]:
        models = _only_patched(self.transformers).values()
        return [graph for model in models if (graph := graph_of(model)) is not None]

    def _check_active(self, verb: str) -> None:
        if not self.active:
            raise PatchError(f"nothing to {verb}: {', '.join(self.transformers) or 'vae'} was restored already.")


def patch(target: object, config: PatchConfig | str = "exact") -> Patch:
    """Bind fused forwards on the transformers and the VAE of a diffusers pipeline, or on one of them.

    The pipeline's video processor then converts the decoded video on the GPU. Module classes and parameters stay the
    same, except for linears that a tier stores in 8 bits. `state_dict` and `save_pretrained` give the original weights.
    They raise RuntimeError if those were freed (``restorable=False``).

    Args:
        target: a diffusers pipeline with a `transformer` (and possibly a `transformer_2`), a transformer of one of the
            models in docs/models.md, or an AutoencoderKLWan or AutoencoderKLQwenImage. A pipeline's VAE of another
            class is not changed. A VAE that is patched already, because pipelines share it, keeps that patch. A VAE
            that was patched alone is restored with this pipeline. The exact tier patches only the VAE of a pipeline
            whose transformers are of unknown families. A warning and the summary say so.
        config: a configuration (`Exact`, `Quantized`, `Sparse`, `BlockSparse`) or the name of a preset.

    A call that another thread begins during the patch waits until the patch is complete. A warning names packages that
    are newer than tested, once.

    Raises:
        PatchError: the model is of an unknown family (and, in a pipeline, the VAE is not patched either). Or the model
            is patched already, compiled, or under a hook that holds its old forward. Or the tier needs 8-bit weights,
            and the weights are offloaded to disk. Or the model lacks the weights that the sparse tier needs. Or another
            thread is in a call of the model, in any tier but the exact one. Or a name in `keep` fits nothing in the
            model, or the list is another model's (this is a ValueError too).
        ValueError: the preset is unknown.
        TypeError: the config is of another type.
    """
    config = resolve_config(config)
    if type(config) in _REFUSALS:
        models, _ = _models_of(target)
        check_patchable(models)
        _refuse(models, _REFUSALS[type(config)])
    return apply_patch(target, config, lambda journal, _, model: replace_computation(journal, model, config))


def _refuse(models: dict[str, torch.nn.Module], why_not: Callable[[str, SelfAttentions], str | None]) -> None:
    """Raise PatchError with the reasons that a function of a model's name and self-attentions gives."""
    problems = [why_not(name, family_of(model).self_attentions(model)) for name, model in models.items()]
    if any(problems):
        raise PatchError("cannot patch: " + " ".join(filter(None, problems)))


def replace_computation(journal: Journal, transformer: torch.nn.Module, config: PatchConfig) -> None:
    """Change what a tier changes besides forwards: attention processors, and weights that it stores in 8 bits."""
    family = family_of(transformer)
    if isinstance(config, Sparse):
        use_processors(journal, family.self_attentions(transformer), config)
    if config.in_8_bits("linears"):
        linears = convertible_linears(transformer, family.linears(transformer), config)
        convert_weights(journal, linears, family.rows_known)


def apply_patch(target: object, config: PatchConfig, prepare: Callable[[Journal, str, torch.nn.Module], None]) -> Patch:
    """Patch as `patch` does, with ``prepare(journal, name, transformer)`` to change each transformer's weights."""
    warn_of_untested()
    transformers, vae = _models_of(target)
    only_vae = _is_only_vae_known(transformers, vae, config)
    transformers, unknown = ({}, transformers) if only_vae else (transformers, {})
    # A call that is partly exact is as good as exact.
    with no_other_calls("patch", {} if isinstance(config, Exact) else transformers):
        vae = _check(target, config, transformers, vae)
        patch = _change(target, config, transformers, vae, unknown, prepare)
    for name, model in unknown.items():
        logger.warning("%s", unknown_line(name, model))
    return patch


def _is_only_vae_known(
    transformers: dict[str, torch.nn.Module], vae: torch.nn.Module | None, config: PatchConfig
) -> bool:
    """True if no family knows a pipeline's transformers, and the exact tier can patch its VAE, or did."""
    if not transformers or not isinstance(config, Exact) or not config.vae:
        return False
    if any(family_of(getattr(model, "_orig_mod", model)) is not None for model in transformers.values()):
        return False
    return vae is not None and (_JOURNAL in vae.__dict__ or vae_family.why_left_alone(vae) is None)


def _check(
    target: object, config: PatchConfig, transformers: dict[str, torch.nn.Module], vae: torch.nn.Module | None
) -> torch.nn.Module | None:
    """Return a target's VAE, or None if that is left as it is.

    Raises PatchError if the target cannot be patched, and KeepError if a name in ``config.keep`` does not fit it.
    """
    check_patchable(transformers)
    if isinstance(config, Sparse):  # load_turbodiffusion and load_converted come here too, and bring proj_l later
        _refuse(transformers, why_not_replaceable)
    for model in transformers.values():
        family_of(model).check_keep(model, config)
    if not transformers and _JOURNAL in vae.__dict__:
        raise PatchError("cannot patch: vae is patched already; call restore() first.")
    if not transformers and (reason := vae_family.why_left_alone(vae)):
        raise PatchError(f"cannot patch vae: {reason}.")
    vae = vae if config.vae or not transformers else None
    if config.exact_steps is not None:
        if isinstance(target, torch.nn.Module):
            raise PatchError(
                "cannot patch: exact_steps needs a pipeline, whose scheduler counts the steps; patch the pipeline."
            )
        if reason := why_not_countable(target):
            raise PatchError(f"cannot patch: exact_steps does not work with a {reason}; leave it at None.")
    if config.in_8_bits("linears"):
        for name, model in transformers.items():
            if is_on_disk(model):
                raise PatchError(f"cannot patch {name}: {ON_DISK}")
    return vae


def _change(
    target: object,
    config: PatchConfig,
    transformers: dict[str, torch.nn.Module],
    vae: torch.nn.Module | None,
    unknown: dict[str, torch.nn.Module],
    prepare: Callable[[Journal, str, torch.nn.Module], None],
) -> Patch:
    steps = None if isinstance(target, torch.nn.Module) else Steps(target)
    journals = []
    try:
        for model in transformers.values():
            journal = Journal()
            journals.append(journal)
            _bind(journal, model, family_of(model).bindings(model, config, steps))
        if vae is not None and _JOURNAL not in vae.__dict__ and vae_family.why_left_alone(vae) is None:
            journals.append(Journal())
            _bind(journals[-1], vae, vae_family.bindings(vae, config))
        for (name, model), journal in zip(transformers.items(), journals, strict=False):
            prepare(journal, name, model)
            if config.in_8_bits("linears"):
                refuse_written_weights(journal, model)
            update_groups(model)
        patch_video_output(journals[0], target, config)
    except BaseException:
        for journal in reversed(journals):
            journal.undo()
        for model in transformers.values():
            update_groups(model)
        raise
    if not config.restorable:  # only now, when nothing can fail any more
        for model, journal in zip(transformers.values(), journals, strict=False):
            free_originals(model)
            journal.forget_parameters()
    if vae is not None and (state := vae_family.vae_state(vae)) is not None:
        state.users.update(transformers.values())
    return Patch(transformers, config, target, vae, unknown)


def _bind(journal: Journal, model: torch.nn.Module, bindings: Iterable[Binding]) -> None:
    journal.set(model, _JOURNAL, journal)
    for module, attribute, value in bindings:
        journal.set(module, attribute, value)


def restore(target: object) -> None:
    """Undo the patch on a pipeline's transformers and VAE, or on one of them.

    A VAE that another patched pipeline shares stays patched, unless it is itself the target.

    Raises:
        PatchError: none of the models is patched, an unknown hook holds a patched forward, or the original weights were
            freed. Or the 8-bit weights are sharded, or the weights are offloaded to disk. Or another thread is in a
            call of the model, in any tier but the exact one.
    """
    transformers, vae = _models_of(target)
    transformers = {name: getattr(m, "_orig_mod", m) for name, m in transformers.items()}
    patched = _restorable(transformers, getattr(vae, "_orig_mod", vae))
    if not patched:
        raise PatchError(f"nothing to restore: {', '.join(transformers) or 'vae'} is not patched.")
    _restore(patched)


def check_patchable(transformers: dict[str, torch.nn.Module]) -> None:
    """Raise PatchError with every reason why these models cannot be patched."""
    problems = [p for name, model in transformers.items() for p in _problems(name, model)]
    if problems:
        raise PatchError("cannot patch: " + " ".join(problems))


def _models_of(target: object) -> tuple[dict[str, torch.nn.Module], torch.nn.Module | None]:
    """Return a pipeline's transformers and its VAE, or the given model. Raises PatchError if there is none."""
    if vae_family.is_vae(getattr(target, "_orig_mod", target)):
        return {}, target
    vae = None if isinstance(target, torch.nn.Module) else getattr(target, "vae", None)
    return transformers_of(target), vae if isinstance(vae, torch.nn.Module) else None


def _only_patched(models: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {name: model for name, model in models.items() if _JOURNAL in model.__dict__}


def _restorable(transformers: dict[str, torch.nn.Module], vae: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
    """Return the patched models, without a VAE that a pipeline which is still patched shares.

    If no transformers are given, the VAE is included anyway.
    """
    found = _only_patched(transformers if vae is None else {**transformers, "vae": vae})
    if transformers and "vae" in found:
        others = set(vae_family.vae_state(vae).users) - set(transformers.values())
        if any(_JOURNAL in other.__dict__ for other in others):
            del found["vae"]
    return found


def transformers_of(target: object) -> dict[str, torch.nn.Module]:
    """Return a pipeline's transformers by name, or the given one. Raises PatchError if there is none."""
    if isinstance(target, torch.nn.Module):
        return {"transformer": target}
    every = {name: getattr(target, name, None) for name in COMPONENTS}
    found = {name: model for name, model in every.items() if isinstance(model, torch.nn.Module)}
    if found.get("transformer") is found.get("transformer_2"):
        found.pop("transformer_2", None)
    if not found:
        raise PatchError(
            f"{with_article(type(target).__name__)} has no transformer to patch; give a diffusers pipeline or its "
            f"transformer. Supported: {SUPPORTED}."
        )
    return found


def _problems(name: str, model: torch.nn.Module) -> list[str]:
    if _JOURNAL in model.__dict__:
        return [f"{name} is patched already; call restore() first."]
    return check_supported(name, model)


def _restore(models: dict[str, torch.nn.Module]) -> None:
    journals = [model.__dict__[_JOURNAL] for model in models.values()]
    check_restorable(models, journals, lambda model: ON_DISK if is_on_disk(model) else None)
    graphs = [graph_of(model) for model in models.values()]
    tiers = {name: getattr(model, SHARED).config for name, model in models.items() if hasattr(model, SHARED)}
    approximate = {name: models[name] for name, config in tiers.items() if not isinstance(config, Exact)}
    with no_other_calls("restore", approximate):
        for journal in journals:
            journal.undo()
        for model in models.values():
            update_groups(model)
    for graph in filter(None, graphs):
        graph.release()
