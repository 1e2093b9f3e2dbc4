// Package emptydir is the plugin of emptyDir volumes: directories on disk or in memory that are
// created empty and removed with their pod.
package emptydir
