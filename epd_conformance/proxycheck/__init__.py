"""The layer `proxy`: a proxy in front of fake servers. Plans say what clients send and what the fakes do; judges read what the
fakes saw and what the clients got.

`plan`, `made`, `evidence` and `judges` are pure; `fakes`, `clients`, `under_test` and `session` carry plans out.
"""
