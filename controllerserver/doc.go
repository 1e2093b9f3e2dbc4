// Package controllerserver is the CSI Controller service. A handler validates
// its request, finds the backend, makes one call and converts the result. Only backends use
// disks.
package controllerserver
