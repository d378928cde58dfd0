"""A minimal EC connector, as a vendor would ship it: `connector` and `store` serve, `subject` describes them for certification."""
