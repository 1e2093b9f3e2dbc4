package payload

import (
	"context"
	"fmt"
	"io/fs"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// kind is one of the plugins. It treats each volume as a projected one: a configMap volume has a
// single source.
type kind struct {
	host plugins.Host
	name string
	// onDisk is true for ConfigMaps, which kubelets keep on disk.
	onDisk bool
	// projection returns nil for a volume of another kind.
	projection func(*corev1.Volume) *corev1.ProjectedVolumeSource
}

const projectedName = "kubernetes.io/projected"

// New creates the plugins.
func New(host plugins.Host) []plugins.VolumePlugin {
	return []plugins.VolumePlugin{
		&kind{host: host, name: "kubernetes.io/configmap", onDisk: true, projection: ofConfigMap},
		&kind{host: host, name: "kubernetes.io/secret", projection: ofSecret},
		&kind{host: host, name: "kubernetes.io/downward-api", projection: ofDownwardAPI},
		&kind{host: host, name: projectedName, projection: func(v *corev1.Volume) *corev1.ProjectedVolumeSource { return v.Projected }},
	}
}

func single(source corev1.VolumeProjection, mode *int32) *corev1.ProjectedVolumeSource {
	return &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{source}, DefaultMode: mode}
}

func ofConfigMap(v *corev1.Volume) *corev1.ProjectedVolumeSource {
	s := v.ConfigMap
	if s == nil {
		return nil
	}
	return single(corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
		LocalObjectReference: s.LocalObjectReference, Items: s.Items, Optional: s.Optional,
	}}, s.DefaultMode)
}

func ofSecret(v *corev1.Volume) *corev1.ProjectedVolumeSource {
	s := v.Secret
	if s == nil {
		return nil
	}
	return single(corev1.VolumeProjection{Secret: &corev1.SecretProjection{
		LocalObjectReference: corev1.LocalObjectReference{Name: s.SecretName}, Items: s.Items, Optional: s.Optional,
	}}, s.DefaultMode)
}

func ofDownwardAPI(v *corev1.Volume) *corev1.ProjectedVolumeSource {
	s := v.DownwardAPI
	if s == nil {
		return nil
	}
	return single(corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: s.Items}}, s.DefaultMode)
}

// at returns the field of a source in the manifest.
func (k *kind) at(i int) *field.Path {
	if k.name == projectedName {
		return field.NewPath("projected", "sources").Index(i)
	}
	return nil
}

func (k *kind) Name() string { return k.name }

func (k *kind) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && k.projection(spec.Volume) != nil
}

// Remounts returns true, also for immutable ConfigMaps: the comparison is cheap.
func (k *kind) Remounts(*plugins.Spec) bool { return true }

func (k *kind) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	path, err := k.host.Paths().CheckedPodVolume(pod.UID, k.name, spec.Name())
	if err != nil {
		return nil, err
	}
	m := &mounter{volume: &volume{k, path}, pod: pod, projection: k.projection(spec.Volume)}
	return m, m.validate()
}

func (k *kind) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	path, err := k.host.Paths().CheckedPodVolume(pod, k.name, name)
	return &volume{k, path}, err
}

// volume is a volume of a pod.
type volume struct {
	*kind
	path string
}

type mounter struct {
	*volume
	pod        *corev1.Pod
	projection *corev1.ProjectedVolumeSource
	warnings   []string
}

func (v *volume) Path() string { return v.path }

// SetUp makes the current content of the manifests the content of the volume. It writes nothing if
// the content is unchanged.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	content, err := m.content(args)
	if err != nil {
		return err
	}
	if err := m.setUp(ctx, content); err != nil {
		return err
	}
	m.warnings, err = m.obstructions(content)
	return err
}

// Warnings reports content that the pod does not see.
func (m *mounter) Warnings() []string { return m.warnings }

// obstructions returns a warning for each name that is not a link to the content.
func (m *mounter) obstructions(content tree) (warnings []string, err error) {
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return nil, err
	}
	tops := content.tops()
	for _, e := range entries {
		if tops[e.Name()] && e.Type() != fs.ModeSymlink {
			warnings = append(warnings, fmt.Sprintf("%q is not the volume's content but a directory or file that a container or its subPath has created: the content is in %s/%[1]s; remove the directory or file, or use another subPath", e.Name(), dataLink))
		}
	}
	return warnings, nil
}
