"""The wire: conversions, channel and server options, servers, error policy, stream senders."""
