// Package environment computes the environment variables that a kubelet gives to a container, and
// expands a subPathExpr with them.
package environment
