"""A process's metrics (Prometheus), traces (OpenTelemetry) and logs."""
