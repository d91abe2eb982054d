"""The keys of the run config that belong to no algorithm: types, ranges, defaults, meanings.

The keys of the algorithms (``craft.server-lr``, …) are not here: they are declared in each Strategy.
In a run config 0 or "" means off, since TOML has no None.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    from fedstrat.strategies import Algorithm

ELSEWHERE = frozenset({
    "results-dir", "state-dir", "resume", "checkpoint-every", "round-timeout", "connect-timeout", "diagnostics",
    "tensorboard", "wandb-project", "dataset.dir", "train.device", "train.threads", "aggregation-device",
})  # fmt: skip
"""Keys that say where and how a run is made, not what it computes: a resumed run may change them, and neither a
comparison nor a report tells runs apart by them."""


def algorithms() -> "Mapping[str, Algorithm]":
    """The table of algorithms by the names that the key ``algorithm`` takes."""
    from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415  (imports torch)

    return ALGORITHMS


def dataset_names() -> Iterable[str]:
    """Names that the key ``dataset.name`` takes."""
    from fedstrat.data.sources import SOURCES  # noqa: PLC0415

    return SOURCES


def partition_names() -> Iterable[str]:
    """Names that the key ``dataset.partition`` takes."""
    from fedstrat.data.protocols import SCHEMES  # noqa: PLC0415

    return SCHEMES


def model_names() -> Iterable[str]:
    """Names that the key ``model.name`` takes, beside import paths."""
    from fedstrat.models import MODELS  # noqa: PLC0415  (imports torch)

    return MODELS


@dataclass(frozen=True)
class OneOf:
    """Marks a key that takes one name of a table which is only loaded when it is needed.

    Attributes:
        names: Gives the allowed names.
        or_import_path: Whether ``package.module:Factory`` is allowed beside them.
    """

    names: Callable[[], Iterable[str]]
    or_import_path: bool = False


def _one_width(value: object) -> object:
    # `-c model.hidden=100` arrives as an int; what it means is plain.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Table(BaseModel):
    """One table of the run config: strict types, unknown names refused, no NaN or infinity, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class DatasetKeys(Table):
    """The table ``dataset``: which data, and how simulated clients share it."""

    name: Annotated[str, OneOf(dataset_names)] = Field(default="digits", description="the data set")
    dir: str = Field(default="", description='folder that holds the data set; "": its usual place')
    partition: Annotated[str, OneOf(partition_names)] = Field(
        default="dirichlet", description="how the data is shared out among simulated clients"
    )
    alpha: float = Field(
        default=0.1,
        gt=0.0,
        description="concentration of the Dirichlet draws of a partition; smaller is more uneven",
    )
    classes_per_client: int = Field(default=2, ge=1, description="classes per client of the pathological partitions")
    min_size: int = Field(default=5, ge=0, description="smallest number of samples that a client may get")
    test_fraction: float = Field(
        default=0.2, ge=0.0, lt=1.0, description="share of each client's samples that it keeps for testing"
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of each client's training samples that is held back, to choose settings with; 0: off",
    )
    vocabulary: Literal["hashed", "frequent", "file"] = Field(
        default="hashed", description="which id a word of a text has; frequent needs data that all clients share"
    )
    vocab_size: int = Field(default=10_000, ge=3, description="number of word ids, padding and unknown word included")
    max_length: int = Field(default=64, ge=1, description="words of a text that count; shorter texts are padded")
    image_size: int = Field(
        default=0, ge=0, description="side in pixels that pictures of image folders are brought to; 0: as they are"
    )


class ModelKeys(Table):
    """The table ``model``: which network is trained."""

    name: Annotated[str, OneOf(model_names, or_import_path=True)] = Field(default="mlp", description="the model")
    hidden: Annotated[str, BeforeValidator(_one_width)] = Field(
        default="100",
        pattern=r"^\s*([1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*)?$",
        description='widths of the hidden layers of mlp, comma-separated whole numbers, "": none',
    )

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the hidden layers as numbers."""
        return tuple(int(part) for part in self.hidden.split(",") if part.strip())


class TrainKeys(Table):
    """The table ``train``: local training on the clients."""

    lr: float = Field(default=0.05, gt=0.0, description="learning rate of the local steps in round 1")
    lr_schedule: Literal["constant", "exponential", "cosine"] = Field(
        default="constant", description="how the local learning rate changes from round to round"
    )
    lr_decay: float = Field(
        default=1.0, gt=0.0, le=1.0, description="factor per round of the exponential schedule; 1 otherwise"
    )
    batch_size: int = Field(default=20, ge=1, description="samples per local step")
    local_epochs: int = Field(default=1, ge=1, description="passes over a client's data per round")
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0, description="momentum of the local optimizer")
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        description="weight decay, added to the raw gradient before the method corrects it",
    )
    clip_norm: float = Field(
        default=0.0,
        ge=0.0,
        description="largest norm of the raw gradient before the method corrects it; 0: off",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$",
        description="auto, cpu, cuda, cuda:N or mps; auto takes CUDA where there is one",
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one client call")
    amp: Literal["off", "bf16"] = Field(
        default="off", description="bf16: local steps evaluate the model under bfloat16 autocast"
    )
    channels_last: bool = Field(
        default=False, description="convolutions' weights lie channels-last in memory, which suits GPUs"
    )
    compile: bool = Field(
        default=False, description="torch.compile the model, once a worker; on a CPU that needs a C++ compiler"
    )
    straggler_share: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share of a cohort that trains for fewer epochs"
    )


class RunKeys(Table):
    """The run config without the tables of the algorithms."""

    algorithm: Annotated[str, OneOf(algorithms)] = Field(default="craft", description="the federated method")
    num_server_rounds: int = Field(default=30, ge=1, description="rounds of the run")
    num_clients: int = Field(default=50, ge=0, description="nodes to wait for before round 1; 0: any number from 2 up")
    fraction_train: float = Field(
        default=0.2, gt=0.0, le=1.0, description="share of the clients that train in a round; one at least"
    )
    fraction_evaluate: float = Field(
        default=1.0, ge=0.0, le=1.0, description="share of the clients that evaluate; 0: no evaluation"
    )
    evaluate_every: int = Field(default=1, ge=1, description="evaluate after every so many rounds, and after the last")
    evaluate_in_train: bool = Field(
        default=False,
        description="the clients that train first evaluate the model that they receive; only the last has a round trip",
    )
    evaluate_personal: bool = Field(
        default=False, description="also evaluate each client's own trained model; FedCSPACK always does"
    )
    seed: int = Field(default=1, ge=0, description="fixes initial weights, partition, cohorts and batches")
    results_dir: str = Field(default="", description='folder for the results; "": the usual place')
    state_dir: str = Field(default="", description='folder for the clients\' state; "": the usual place')
    resume: str = Field(default="", description='results folder of the run to go on with; "": a new run')
    checkpoint_every: int = Field(default=1, ge=0, description="rounds from one checkpoint to the next; 0: none")
    round_timeout: float = Field(default=0.0, ge=0.0, description="seconds that a round may take; 0: one hour")
    connect_timeout: float = Field(default=600.0, gt=0.0, description="seconds to wait for the nodes before round 1")
    min_replies: int = Field(default=1, ge=1, description="usable replies without which a round leaves the model alone")
    max_failed_rounds: int = Field(
        default=3, ge=1, description="rounds in a row without enough usable replies that end the run"
    )
    max_update_norm: float = Field(
        default=0.0, ge=0.0, description="longest client update, longer ones are scaled; 0: off"
    )
    update_dtype: Literal["model", "bfloat16", "float16"] = Field(
        default="model",
        description="numbers in which clients send how they moved the model; model: the model itself, as it is",
    )
    streaming: bool = Field(
        default=False,
        description="add replies to a mean one by one and let go of each, for methods that step by the mean",
    )
    aggregation_device: str = Field(
        default="cpu",
        pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$",
        description="where the server works out inner products of updates: cpu, cuda, cuda:N, or auto",
    )
    target_accuracy: float = Field(
        default=0.0, ge=0.0, le=1.0, description="mean client accuracy that the run is after; 0: none"
    )
    patience: int = Field(
        default=0, ge=0, description="evaluations without a better mean accuracy that end the run; 0: off"
    )
    diagnostics: Literal["off", "light", "full"] = Field(
        default="light",
        description="numbers that explain results: light has conflict and drift every round and the final sharpness,"
        " full the sharpness at every evaluation",
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard files into the results folder")
    wandb_project: str = Field(default="", description='also log to this project of Weights & Biases; "": no')
    dataset: DatasetKeys = DatasetKeys()
    model: ModelKeys = ModelKeys()
    train: TrainKeys = TrainKeys()
