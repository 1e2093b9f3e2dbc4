// Package downward gives values of a pod and its containers (downward API), for volumes
// and for environment variables.
package downward
