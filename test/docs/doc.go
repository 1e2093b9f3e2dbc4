// Package docs tests README.md and docs/. The language of each fenced block is its type: sh for
// commands, yaml, go, or text. The plan lists for each block of commands where a test runs it
// unmodified: on a clean machine of this package, in the cluster of test/e2e, or, with a reason,
// nowhere. All commands must parse. Each error text of docs/errors.md must occur in the source.
package docs
