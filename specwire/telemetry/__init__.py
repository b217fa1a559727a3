"""What a process tells those who run it: figures (Prometheus), traces (OpenTelemetry) and logs."""
