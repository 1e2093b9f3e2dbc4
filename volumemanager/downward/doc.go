// Package downward returns the values of the downward API, for volumes and for environment
// variables.
package downward
