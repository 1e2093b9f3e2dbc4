package state

import (
	"fmt"
	"path/filepath"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/environment"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// use is a volumeMount of a container, or (mount is nil) a volumeDevice.
type use struct {
	container *corev1.Container
	index     int
	mount     *corev1.VolumeMount
}

// usesOf returns the uses of a pod's volumes, keyed by the volumes' names.
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

// use checks how the containers use a volume, and resolves its subPaths.
func (p Populator) use(v *PodVolume, uses []use, objects *manifest.Objects) error {
	for _, u := range uses {
		switch {
		case v.ID.Block && u.mount != nil:
			return plugins.Invalidf("volumeMounts of container %q contain volume %q, which is a raw device (volumeMode Block): use volumeDevices", u.container.Name, v.Name)
		case !v.ID.Block && u.mount == nil:
			return plugins.Invalidf("volumeDevices of container %q contain volume %q, which is a filesystem: use volumeMounts, or a claim with volumeMode Block", u.container.Name, v.Name)
		}
		if u.mount == nil {
			continue
		}
		if err := p.subPath(v, u, objects); err != nil {
			return err
		}
	}
	return nil
}

func (p Populator) subPath(v *PodVolume, u use, objects *manifest.Objects) error {
	sub := u.mount.SubPath
	if expression := u.mount.SubPathExpr; expression != "" {
		machine := environment.Machine{Objects: objects, Node: p.Node, Dir: p.Paths.Root}
		variables, err := machine.Variables(v.Pod, u.container)
		if err != nil {
			return fmt.Errorf("container %q, %w", u.container.Name, err)
		}
		if sub, err = variables.Expand(expression); err != nil {
			return fmt.Errorf("container %q, subPathExpr %q: %w", u.container.Name, expression, err)
		}
	}
	if sub == "" {
		return nil
	}
	if err := segments(u.container.Name); err != nil {
		return plugins.Invalidf("the container's name %q: %v", u.container.Name, err)
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
