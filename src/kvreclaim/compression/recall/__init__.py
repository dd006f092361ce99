"""Which evicted tokens share a page, what is known of a page, and what queries make of it: no bytes."""
