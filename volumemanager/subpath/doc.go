// Package subpath binds what is in a volume for a container that has a part of it
// (VolumeMount, subPath).
package subpath
