// Package ownership sets the group of the files in a volume to a pod's fsGroup
// (PodSecurityContext).
package ownership
