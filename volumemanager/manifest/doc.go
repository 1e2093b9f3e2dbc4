// Package manifest reads a directory of Kubernetes manifests, and goes on reading it.
package manifest
