"""The verifier's session, and what proposes to it. It applies the law and asks the policy."""
