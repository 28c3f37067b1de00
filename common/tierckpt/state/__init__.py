"""State: the live training state as names, values and bytes."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .extras import MAX_MEMBERS, PLAIN_VALUES, HeldGenerators, PlainValues, generator_state
    from .module_states import MODULE_STATES, ModuleStates
    from .names import unwrap
    from .optimizers import refuse_model
    from .process_state import digests_of, load_rng, pack_rng, take_up
    from .training_state import FileWindows, KeptFile, Placements, RoutedState, TrainingState
    from .training_state import label_optimizers
    from .tree_codec import TAG, Arena, EncodedTree, ForeignValue, Packed, as_bytes
    from .tree_codec import decode as decode_tree, flat, is_dense, pack as pack_tree, row_major
    from .tree_codec import spec_of, unpack as unpack_tree
    from .witness import Comparison, Fingerprint, difference as witness_difference
    from .witness import fingerprint as batch_fingerprint

__getattr__ = lazy_exports(__name__)
