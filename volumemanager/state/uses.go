package state

import (
	"path/filepath"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// use is what a container has of a volume: a volumeMount, or (mount is nil) a
// volumeDevice.
type use struct {
	container *corev1.Container
	index     int
	mount     *corev1.VolumeMount
}

// usesOf are a pod's, by the names of volumes.
func usesOf(pod *corev1.Pod) map[string][]use {
	uses := map[string][]use{}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			c := &containers[i]
			for j := range c.VolumeMounts {
				m := &c.VolumeMounts[j]
				uses[m.Name] = append(uses[m.Name], use{c, j, m})
			}
			for j, d := range c.VolumeDevices {
				uses[d.Name] = append(uses[d.Name], use{container: c, index: j})
			}
		}
	}
	return uses
}

// use looks at what the containers make of a volume.
func (p Populator) use(v *PodVolume, uses []use) error {
	for _, u := range uses {
		switch {
		case v.ID.Block && u.mount != nil:
			return plugin.Invalidf("volumeMounts of container %q have volume %q, which is a raw device (volumeMode Block): use volumeDevices", u.container.Name, v.Name)
		case !v.ID.Block && u.mount == nil:
			return plugin.Invalidf("volumeDevices of container %q have volume %q, which is a filesystem: use volumeMounts, or a claim with volumeMode Block", u.container.Name, v.Name)
		}
		if u.mount == nil {
			continue
		}
		if err := p.subPath(v, u); err != nil {
			return err
		}
	}
	return nil
}

func (p Populator) subPath(v *PodVolume, u use) error {
	sub := u.mount.SubPath
	if u.mount.SubPathExpr != "" {
		var err error
		if sub, err = expand(u.mount.SubPathExpr, v.Pod, u.container.Env); err != nil {
			return err
		}
	}
	if sub == "" {
		return nil
	}
	if err := segments(u.container.Name); err != nil {
		return plugin.Invalidf("the container's name %q: %v", u.container.Name, err)
	}
	v.SubPaths = append(v.SubPaths, SubPath{
		Container: u.container.Name,
		Index:     u.index,
		MountPath: u.mount.MountPath,
		SubPath:   sub,
		ReadOnly:  u.mount.ReadOnly,
		Path:      filepath.Join(p.Paths.PodSubPaths(v.Pod.UID, v.Spec.Name()), u.container.Name, strconv.Itoa(u.index)),
	})
	return nil
}

// expand replaces $(NAME) by the container's variables, and $$ by $, as Kubernetes does.
// What a variable takes from other objects is not known here.
func expand(expression string, pod *corev1.Pod, env []corev1.EnvVar) (string, error) {
	var b strings.Builder
	for rest := expression; rest != ""; {
		before, after, found := strings.Cut(rest, "$")
		b.WriteString(before)
		if !found {
			break
		}
		name, further, closed := strings.Cut(strings.TrimPrefix(after, "("), ")")
		switch {
		case strings.HasPrefix(after, "$"):
			b.WriteByte('$')
			rest = after[1:]
		case strings.HasPrefix(after, "(") && closed:
			value, err := variable(name, pod, env)
			if err != nil {
				return "", plugin.Invalidf("subPathExpr %q: %v", expression, err)
			}
			b.WriteString(value)
			rest = further
		default:
			b.WriteByte('$')
			rest = after
		}
	}
	return b.String(), nil
}

func variable(name string, pod *corev1.Pod, env []corev1.EnvVar) (string, error) {
	fields := map[string]string{
		"metadata.name":      pod.Name,
		"metadata.namespace": pod.Namespace,
		"metadata.uid":       string(pod.UID),
		"spec.nodeName":      pod.Spec.NodeName,
	}
	for i, e := range env {
		if e.Name != name {
			continue
		}
		if e.ValueFrom == nil {
			// Values may have variables that are defined before them.
			return expand(e.Value, pod, env[:i])
		}
		if ref := e.ValueFrom.FieldRef; ref != nil {
			if value, ok := fields[ref.FieldPath]; ok {
				return value, nil
			}
		}
		return "", plugin.Invalidf("variable %s comes from elsewhere: give it a value, or metadata.name, metadata.namespace, metadata.uid or spec.nodeName", name)
	}
	return "", plugin.Invalidf("variable %s is not in the container's env: add it", name)
}
