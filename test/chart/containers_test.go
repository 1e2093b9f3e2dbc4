package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestContainersDocumented checks the table of the privileges of all containers. With -update, the test writes it.
func TestContainersDocumented(t *testing.T) {
	var rows strings.Builder
	for _, tc := range []struct{ values, pod, title string }{
		{"pools: {fast: {lvm: {volumeGroup: vg0}}}\n", "trivet-node", "node"},
		{withSnapshots, "trivet-controller", "controller"},
		{withSnapshots + "nfs: {enabled: true}\n", "trivet-controller", "controller with NFS enabled"},
	} {
		pod := pods(template(t, tc.values, externalAPIs))[tc.pod].Spec
		var all []string                    // the privileges
		containers := map[string][]string{} // the names of the containers with the same privileges
		for _, c := range pod.Containers {
			text := privilegesOf(pod, c)
			if !slices.Contains(all, text) {
				all = append(all, text)
			}
			containers[text] = append(containers[text], c.Name)
		}
		for _, text := range all {
			fmt.Fprintf(&rows, "| %s | %s | %s |\n", tc.title, strings.Join(containers[text], ", "), text)
		}
	}
	frozen.Generated(t, "../../docs/operations/security.md", "make docs-containers",
		"| pod | containers | user | capabilities | seccomp profile | directories of the node |\n|---|---|---|---|---|---|\n"+rows.String())
}

// withSnapshots enables all sidecars of the controller.
const withSnapshots = `snapshots: {enabled: true, metadata: {enabled: true, secretName: tls, caCert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"}}` + "\n"

// privilegesOf returns the cells of the table for a container.
func privilegesOf(pod corev1.PodSpec, c corev1.Container) string {
	s := c.SecurityContext
	user := s.RunAsUser
	if user == nil {
		user = pod.SecurityContext.RunAsUser
	}
	capabilities, seccomp := "all (`privileged`)", "none (`privileged`)"
	if !*s.Privileged {
		seccomp, capabilities = string(s.SeccompProfile.Type), "none"
		var names []string
		for _, name := range s.Capabilities.Add {
			names = append(names, "`"+string(name)+"`")
		}
		if len(names) > 0 {
			capabilities = strings.Join(names, ", ")
		}
	}
	directories := "none"
	if names := hostPaths(pod, c); len(names) > 0 {
		directories = strings.Join(names, ", ")
	}
	return fmt.Sprintf("%d | %s | %s | %s", *user, capabilities, seccomp, directories)
}

// hostPaths returns the directories of the node that a container can access.
func hostPaths(pod corev1.PodSpec, c corev1.Container) (found []string) {
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if at := pod.Volumes[i].HostPath; at != nil {
			text := "`" + at.Path + "`"
			if m.MountPropagation != nil {
				text += " (" + string(*m.MountPropagation) + ")"
			}
			found = append(found, text)
		}
	}
	return found
}
