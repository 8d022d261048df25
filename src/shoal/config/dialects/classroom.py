"""classroom: students' laptops train a GAN through a PostgreSQL database."""

from shoal.config.dialects.table import Dialect, Implied, Row, WrittenKeys, same

_UNITS = "strategy[workunits]"
_DATABASE = "transport[postgres]"


def _imply(seen: WrittenKeys) -> Implied:
    why = "classroom files train a GAN in work units through PostgreSQL"
    own = seen.value("database.host") in (None, "embedded")
    served: Implied = {"data.source.serve": (True, "a class with a server of its own gives its images to students that lack them")}
    return (served if own else {}) | {
        "strategy.kind": ("workunits", why),
        "transport.kind": ("postgres", why),
        "model.kind": ("dcgan", why),
        "data.source.kind": ("images", why),
        "data.source.download": ("nielsr/CelebA-faces", "the data set of classroom files"),
        "training.optimizer.name": ("Adam", "the optimizer of classroom files"),
    }


CLASSROOM = Dialect(
    "classroom",
    "A class trains a GAN through PostgreSQL",
    (
        *same("database.", f"{_DATABASE}.", "host port database user password"),
        Row("training.batch_size", "training.batch_size", default=32),
        Row("training.batches_per_work_unit", f"{_UNITS}.batches_per_unit", also=("batches_per_work_unit",)),
        Row(
            "training.num_workunits_per_update",
            f"{_UNITS}.units_per_update",
            also=("num_workunits_per_update",),
            old=("training.num_workers_per_update", "num_workers_per_update"),
        ),
        Row("training.learning_rate_g", "training.players.generator.learning_rate", default=0.0002),
        Row("training.learning_rate_d", "training.players.discriminator.learning_rate", default=0.0002),
        Row("training.beta1", "training.optimizer.beta1", default=0.5),
        Row("training.beta2", "training.optimizer.beta2", default=0.999),
        Row("training.num_epochs", "training.epochs", default=50),
        Row("worker.poll_interval", f"{_DATABASE}.poll_interval_s"),
        Row("worker.heartbeat_interval", "coordinator.heartbeat_interval_s", default=30),
        Row("worker.work_unit_timeout", f"{_UNITS}.lease_timeout_s"),
        Row("worker.max_retries", f"{_UNITS}.max_retries"),
        Row("worker.num_workers_dataloader", "data.loader.num_workers", default=4),
        *same("model.", "model[dcgan].", "latent_dim generator_features discriminator_features"),
        Row("data.dataset_path", "data.source[images].path", default="data/celeba_torchvision/celeba/img_align_celeba"),
        Row("data.num_workers_dataloader", "data.loader.num_workers"),
        *same("huggingface.", "hub.", "enabled repo_id token push_interval private"),
    ),
    _imply,
)
