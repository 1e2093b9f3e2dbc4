// Package environment gives the environment variables that a container has under a
// kubelet, and expands a subPathExpr with them.
package environment
