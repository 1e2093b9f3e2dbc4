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

// plugin is one of the plugins. It converts each volume to a projected volume: a configMap volume, for
// example, becomes a projected volume with a single source.
type plugin struct {
	host plugins.Host
	name string
	// onDisk is true for ConfigMaps, which kubelets keep on disk.
	onDisk bool
	// projection returns the sources of a volume; nil if the volume belongs to another plugin.
	projection func(*corev1.Volume) *corev1.ProjectedVolumeSource
}

const projectedName = "kubernetes.io/projected"

// New creates the plugins.
func New(host plugins.Host) []plugins.VolumePlugin {
	return []plugins.VolumePlugin{
		&plugin{host: host, name: "kubernetes.io/configmap", onDisk: true, projection: ofConfigMap},
		&plugin{host: host, name: "kubernetes.io/secret", projection: ofSecret},
		&plugin{host: host, name: "kubernetes.io/downward-api", projection: ofDownwardAPI},
		&plugin{host: host, name: projectedName, projection: func(v *corev1.Volume) *corev1.ProjectedVolumeSource { return v.Projected }},
	}
}

// single returns a projected volume with one source.
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

// sourceField returns the field of source i in the manifest of a projected volume. For other volumes, whose
// manifests have no list of sources, it returns nil.
func (p *plugin) sourceField(i int) *field.Path {
	if p.name == projectedName {
		return field.NewPath("projected", "sources").Index(i)
	}
	return nil
}

func (p *plugin) Name() string { return p.name }

func (p *plugin) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && p.projection(spec.Volume) != nil
}

// Remounts returns true, even for immutable ConfigMaps, because SetUp of unchanged content is cheap.
func (p *plugin) Remounts(*plugins.Spec) bool { return true }

func (p *plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	path, err := p.host.Paths().CheckedPodVolume(pod.UID, p.name, spec.Name())
	if err != nil {
		return nil, err
	}
	m := &mounter{volume: &volume{p, path}, pod: pod, projection: p.projection(spec.Volume)}
	return m, m.validate()
}

func (p *plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	path, err := p.host.Paths().CheckedPodVolume(pod, p.name, name)
	return &volume{p, path}, err
}

// volume is a pod's volume, whose manifest may have been removed.
type volume struct {
	*plugin
	path string
}

// mounter is a volume with its manifest.
type mounter struct {
	*volume
	pod        *corev1.Pod
	projection *corev1.ProjectedVolumeSource
	warnings   []string
}

func (v *volume) Path() string { return v.path }

// SetUp writes the current content of the manifests to the volume. It writes nothing if the volume has
// that content.
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

// Warnings reports files that hide content from the pod.
func (m *mounter) Warnings() []string { return m.warnings }

// obstructions returns a warning for each file or directory that takes the place of a link to the
// content.
func (m *mounter) obstructions(content tree) (warnings []string, err error) {
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return nil, err
	}
	names := content.topNames()
	for _, e := range entries {
		if names[e.Name()] && e.Type() != fs.ModeSymlink {
			warnings = append(warnings, fmt.Sprintf("%q is not the volume's content but a directory or file that a container or its subPath has created: the content is in %s/%[1]s; remove the directory or file, or use another subPath", e.Name(), dataLink))
		}
	}
	return warnings, nil
}
