"""`make bench-ingress`: what Ray Serve before an orchestrator costs."""
