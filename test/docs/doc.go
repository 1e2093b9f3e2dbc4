// Package docs tests README.md and docs/. Each fenced block has the language sh (commands), yaml, go
// or text. Each block of commands is in the plan: in a session that a test runs on a clean machine
// (Machine) or in the cluster of test/e2e (Cluster), or in Nowhere with the reason. The program must
// accept the flags of all its commands, and the source must contain each message of docs/reference/errors.md.
package docs
