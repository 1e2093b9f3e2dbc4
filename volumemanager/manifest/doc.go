// Package manifest reads a directory of Kubernetes manifests and watches it for changes.
package manifest
