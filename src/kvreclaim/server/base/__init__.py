"""Settings, errors, ids, fields and vocabulary that both dialects share."""
