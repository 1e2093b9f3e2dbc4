// Package emptydir is the plugin of emptyDir volumes: directories that begin empty and go
// with their pod, on the disk or in memory.
package emptydir
