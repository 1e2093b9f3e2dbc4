// Package ownership gives what is in a volume to a pod's group (PodSecurityContext,
// fsGroup).
package ownership
