"""The first state of a run: initial values, or the values of a checkpoint or file of weights."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.listing import LATEST, find, load_latest_valid
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.restore import (
    RunWeights,
    base_sums,
    check_unchanged,
    describe_missing,
    load_initial_variables,
)
from spmdtrain.checkpoints.run_identity import Identity, LoraRecord, record_rules
from spmdtrain.checkpoints.weights.assignment import (
    assign_weights,
    check_taken,
    place,
    report,
    rules_of_file,
)
from spmdtrain.checkpoints.weights.source import WeightSource, is_weights_file, open_weights
from spmdtrain.checkpoints.weights.weight_map import WeightMap
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.record.storage import absolute, folder_of
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.optimizer import with_base
from spmdtrain.step.state import TrainState, averaged_steps
from spmdtrain.train.starting_state import InitialState
from spmdtrain.tree import in_dtype_of, named_leaves, path_name

PyTree = Any


@dataclass(frozen=True)
class LoadedValues:
    """The values of a model from a checkpoint or from a file of weights.

    Attributes:
      step: The step of the checkpoint; 0 for a file of weights.
      identity: The run that saved the checkpoint; None for a file of weights.
      lora: The place of a base model's values, without checksums.
    """

    variables: Variables
    step: int = 0
    identity: Identity | None = None
    lora: LoraRecord = field(default_factory=LoraRecord)


@dataclass(frozen=True)
class ValueLoader:
    """Loads the values of a model at the start of a run.

    Attributes:
      config: Has the seed, and `init_from`, whose parameters replace the initial ones.
      weight_map: Rules for the arrays of `init_from`.
      terminal: Shows corrupted checkpoints, and the table of what is taken.
    """

    steps: StepFunctions
    config: RunConfig
    weight_map: WeightMap
    terminal: Terminal

    def initial_state(self) -> InitialState:
        steps, config = self.steps, self.config
        state = steps.init(config.seed)
        if not config.init_from:
            return InitialState(state)
        # Freed before others are loaded: the devices need not hold two models.
        state = dataclasses.replace(state, params={}, opt_state={}, averaged={}, model_state={})
        loaded = self.load(config.init_from, config.checkpoint)
        found, places = loaded.variables, steps.shardings
        params, model_state = steps.as_parameters(found)
        params = jax.device_put(params, places.params)
        averaged: PyTree = {}
        like = steps.abstract_state.averaged
        if jax.tree.leaves(like):  # separate arrays, because the state is donated
            averaged = jax.tree.map(
                lambda x, like: jnp.copy(in_dtype_of(x, like)), found.params, like
            )
            averaged = jax.device_put(averaged, places.averaged)
        state = dataclasses.replace(
            state,
            params=params,
            # Some optimizers keep a copy of the parameters that they start from.
            opt_state=steps.opt_state_of(params),
            averaged=averaged,
            model_state=model_state,
        )
        return InitialState(state, loaded.lora)

    def base_weights(self, folder: epath.Path, manifest: Manifest) -> tuple[Variables, LoraRecord]:
        """Loads the base weights that a checkpoint leaves out, and verifies their checksums.

        Returns:
          The weights, None in place of other variables, and the record of where they are.

        Raises:
          UserError: If they are missing, or differ from the weights that the factors were trained
            for.
        """
        lora, given, base = manifest.identity.lora, self.config.init_from, self.steps.base
        assert base is not None
        known = (None, manifest.identity.config.get("init_from"), *_names_of(folder))
        source = lora.source if given in known else str(given)
        try:
            loaded = self.load(source, LATEST)
        except UserError as error:
            raise UserError(describe_missing(folder, lora, error)) from error
        values = base.values(self.steps.as_parameters(loaded.variables))
        check_unchanged(base_sums(values), lora, folder)
        return values, dataclasses.replace(lora, source=loaded.lora.source, rules=loaded.lora.rules)

    def load(self, path: str, which: str | int) -> LoadedValues:
        """Loads the model's values from a checkpoint of any run, or a file of weights.

        By `init_from_strict`, arrays that are missing or do not fit are an error or keep their
        initial values.

        Args:
          path: A workdir, one of its checkpoints/STEP, or weights of another program.
          which: The checkpoint of a workdir: "latest", "best" or a step.

        Returns:
          The values in the run's shardings, with the step and the run that saved them.

        Raises:
          UserError: If there is no such file or checkpoint, or it is of another model.
        """
        is_file = process_group.run_on_all(lambda: is_weights_file(path), UserError)
        if process_group.broadcast(is_file):
            if which != LATEST:
                raise UserError(f"{path} is a file of weights: leave checkpoint={which} out")
            weights = process_group.run_on_all(lambda: open_weights(path), UserError)
            taken = self._take(weights, self.weight_map, UserError)
            return LoadedValues(
                taken, lora=self._lora(str(absolute(folder_of(path))), self.weight_map)
            )
        source = process_group.run_on_all(lambda: find(path, which), UserError)

        def load(folder: epath.Path, manifest: Manifest) -> Variables:
            return self._of_checkpoint(path, folder, manifest)

        found = load_latest_valid(source, load, self.terminal.line, by_all=True)
        folder, saved = source.path(found.manifest.step), found.manifest.identity
        variables, lora = found.value, self._lora(str(folder), ())
        if saved.lora.source:
            base, lora = self.base_weights(folder, found.manifest)
            variables = with_base(variables, base)
        count = len(jax.tree.leaves(variables))
        self.terminal.line(
            f"parameters of step {found.manifest.step} from {folder}"
            + (f": all {count} arrays" if self._is_exact(path, saved) else "")
        )
        return LoadedValues(variables, found.manifest.step, saved, lora)

    def _lora(self, source: str, weight_map: WeightMap) -> LoraRecord:
        base = self.steps.base
        if base is None:
            return LoraRecord()
        return LoraRecord(base.alpha, source, record_rules(weight_map))

    def _is_exact(self, path: str, saved: Identity) -> bool:
        """Returns whether a run must have the arrays of this model, and no others."""
        if bool(saved.lora.alpha) != (self.steps.base is not None):
            return False  # a run of the base model lacks the factors
        # The options are those of init_from: a run's own checkpoint always has the whole model.
        strict = self.config.init_from_strict == "all"
        return path != self.config.init_from or (strict and not self.weight_map)

    def _of_checkpoint(self, path: str, folder: epath.Path, manifest: Manifest) -> Variables:
        """Returns the values in a checkpoint, None in place of base weights that it leaves out."""
        saved, base, steps = manifest.identity.lora, self.steps.base, self.steps
        if saved.alpha and (base is None or base.alpha != saved.alpha):
            raise UserError(
                f"{folder} is of a run with LoRA of alpha {saved.alpha:g}, and this model has "
                + (
                    f"alpha {base.alpha:g}"
                    if base
                    else "no LoRA: export it, and start from the file"
                )
            )
        if self._is_exact(path, manifest.identity):
            abstract, shardings = steps.abstract_state, steps.shardings
            if base is not None and saved.source:
                abstract, shardings = map(base.without_base, (abstract, shardings))
            config = config_as_json(self.config)
            return load_initial_variables(folder, manifest, abstract, shardings, config)
        own = process_group.run_on_all(
            lambda: RunWeights(folder, manifest), CheckpointCorruptedError
        )
        # Without the weight map, a base model's names are those of a run of that model.
        rules = () if base is not None else self.weight_map
        return self._take(own, rules, CheckpointCorruptedError)

    def _take(
        self, source: WeightSource, weight_map: WeightMap, expected: type[Exception]
    ) -> Variables:
        """Returns the values of a file in their shardings; arrays that it lacks are initialized."""
        process_group.check_same(
            {"init_from": {name: str(header) for name, header in source.headers.items()}}
        )
        steps = self.steps
        abstract = Variables(steps.abstract_state.params, steps.abstract_state.model_state)
        shardings = Variables(steps.shardings.params, steps.shardings.model_state)
        placed = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        )
        leaves = _named(placed)
        added = steps.base.added if steps.base else ()
        targets = {
            name: leaf
            for name, leaf in leaves.items()
            if name not in added
            and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)  # random keys
        }
        rules = weight_map or rules_of_file(source, steps.file_names)
        found = assign_weights(source.path, source.headers, targets, rules)
        self.terminal.console.print(report(source.path, found, source.headers, targets))
        check_taken(source.path, found, strict=self.config.init_from_strict == "all")
        if frozen := [n for n in found.kept if steps.base and steps.update.is_frozen(n)]:
            raise UserError(
                f"init_from {source.path}: it lacks {frozen[0]}, which LoRA freezes, or has it in "
                "another shape: train that parameter (LoraModel(..., train=[...]))"
            )
        values: dict[str, jax.Array] = {}
        if others := leaves.keys() - found.pieces.keys():
            state = steps.init(self.config.seed)
            initial = _named(Variables(state.params, state.model_state))
            values = {name: initial[name] for name in others}
            del state, initial  # freed before others are loaded
        values |= place(source, found, targets, expected)
        return jax.tree_util.tree_map_with_path(lambda at, _: values[path_name(at[1:])], placed)


def _names_of(checkpoint: epath.Path) -> list[str]:
    """Returns the paths that name a checkpoint, as a user may have given them."""
    return [str(checkpoint), str(checkpoint.parent), str(checkpoint.parent.parent)]


def at_step_zero(state: TrainState, shardings: TrainState) -> TrainState:
    """Returns the state with step 0 and otherwise unchanged arrays."""

    def number(value: jax.Array | int, sharding: Any) -> jax.Array:
        array = np.asarray(value, np.int32)
        return jax.make_array_from_callback((), sharding, lambda _: array)

    steps = averaged_steps(state.step, state.averaged_before)  # which its decay follows
    return dataclasses.replace(
        state,
        step=number(0, shardings.step),
        averaged_before=jax.tree.map(lambda place: number(steps, place), shardings.averaged_before),
    )


def _named(variables: Variables) -> dict[str, Any]:
    """Returns the leaves of the parameters and of the model state by their paths in the model."""
    params, model_state = map(named_leaves, variables)
    if both := params.keys() & model_state.keys():
        raise UserError(f"{min(both)} is both a parameter and a part of the model state")
    return params | model_state
