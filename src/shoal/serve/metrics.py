"""What the server counts, in the form that Prometheus reads."""

from __future__ import annotations

from collections import Counter

from shoal.serve.engine import Engine


class Metrics:
    """Requests by status, beside what the engine knows itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answered: Counter[int] = Counter()

    def text(self) -> str:
        engine = self.engine
        lines = ["# TYPE shoal_requests_total counter"]
        lines += [f'shoal_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.answered.items())]
        for name, kind, value in (
            ("shoal_prompt_tokens_total", "counter", engine.tokens_read),
            ("shoal_written_tokens_total", "counter", engine.tokens_written),
            ("shoal_requests_running", "gauge", len(engine.running)),
            ("shoal_requests_waiting", "gauge", len(engine.waiting)),
            ("shoal_places", "gauge", engine.most_running),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
