// Package controllerserver is the CSI Controller service. A handler validates
// its request, finds the backend, makes one call and translates the answer;
// what is done to disks is done by backends.
package controllerserver
