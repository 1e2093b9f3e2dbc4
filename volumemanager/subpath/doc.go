// Package subpath bind-mounts a part of a volume for a container (VolumeMount, subPath).
package subpath
