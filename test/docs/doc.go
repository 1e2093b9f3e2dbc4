// Package docs holds the commands of README.md and docs/ to account. Each fenced block says
// what it is by its language: sh for commands, yaml, or text. The plan says for each block of
// commands where a test runs it, as printed: on a clean machine of this package, in the
// cluster of test/e2e, or, with a reason, nowhere. What runs nowhere has to parse.
package docs
