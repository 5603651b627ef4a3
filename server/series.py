"""Prometheus series that carry the name of the served model."""

from collections.abc import Hashable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Series:
    """Makes the series of one registry. Names get our prefix; labels: model_name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = model_name

    def counter(self, name: str, text: str) -> Counter:
        labelled = Counter(f"adaflash_{name}", text, ["model_name"], registry=self._registry)
        return labelled.labels(self._model)

    def gauge(self, name: str, text: str) -> Gauge:
        labelled = Gauge(f"adaflash_{name}", text, ["model_name"], registry=self._registry)
        return labelled.labels(self._model)

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        labelled = Histogram(
            f"adaflash_{name}",
            text,
            ["model_name"],
            registry=self._registry,
            buckets=tuple(buckets),
        )
        return labelled.labels(self._model)

    def counter_by(
        self, name: str, text: str, label: str, values: Iterable[Hashable] = ()
    ) -> "CounterBy":
        """A counter for each value of `label`; those of `values` exist from the start."""
        labels = ["model_name", label]
        counter = Counter(f"adaflash_{name}", text, labels, registry=self._registry)
        return CounterBy(counter, self._model, values)


class CounterBy:
    """A counter for each value of a label, made when it is first asked for."""

    def __init__(self, counter: Counter, model_name: str, values: Iterable[Hashable]) -> None:
        self._counter = counter
        self._model = model_name
        self._children: dict[Hashable, Counter] = {}  # looking one up in `counter` takes a lock
        self.prepare(values)

    def prepare(self, values: Iterable[Hashable]) -> None:
        """Let the counters of `values` exist: a rate misses the step from nothing to the first."""
        for value in values:
            self.of(value)

    def of(self, value: Hashable) -> Counter:
        child = self._children.get(value)
        if child is None:
            child = self._children[value] = self._counter.labels(self._model, value)
        return child
