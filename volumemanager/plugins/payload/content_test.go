package payload_test

import (
	"cmp"
	"os"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestContent: each kind of volume has the content, owners and modes as with a kubelet. The umask has no
// effect.
func TestContent(t *testing.T) {
	before := syscall.Umask(0o077)
	t.Cleanup(func() { syscall.Umask(before) })
	h := newHost(t)
	h.configMap("web", map[string]string{"port": "80", "host": "::"})
	h.ConfigMaps["shop/web"].BinaryData = map[string][]byte{"icon": {0xff, 0}}
	h.secret("tls", map[string]string{"key": "k", "cert": "c"})
	private := item("key", "private/deep/key")
	private.Mode = new(int32(0o400))
	group := plugins.MounterArgs{FSGroup: new(int64(2000))}
	for _, tc := range []struct {
		name   string
		volume corev1.Volume
		args   plugins.MounterArgs
		want   map[string]string
	}{
		{"configMap", configMapVolume("web"), plugins.MounterArgs{}, map[string]string{
			"port": "-rw-r--r-- 0:0 80", "host": "-rw-r--r-- 0:0 ::", "icon": "-rw-r--r-- 0:0 \xff\x00",
		}},
		{"configMap's items", configMapVolume("web", item("port", "net/port"), item("host", "net/host")), plugins.MounterArgs{}, map[string]string{
			"net": "drwxr-xr-x 0:0", "net/port": "-rw-r--r-- 0:0 80", "net/host": "-rw-r--r-- 0:0 ::",
		}},
		{"secret", secretVolume("tls"), plugins.MounterArgs{}, map[string]string{
			"key": "-rw-r--r-- 0:0 k", "cert": "-rw-r--r-- 0:0 c",
		}},
		{"an item's mode", secretVolume("tls", private, item("cert", "./cert")), plugins.MounterArgs{}, map[string]string{
			"private": "drwxr-xr-x 0:0", "private/deep": "drwxr-xr-x 0:0", "private/deep/key": "-r-------- 0:0 k", "cert": "-rw-r--r-- 0:0 c",
		}},
		{"fsGroup", secretVolume("tls", private), group, map[string]string{
			"private": "dgrwxr-xr-x 0:2000", "private/deep": "dgrwxr-xr-x 0:2000", "private/deep/key": "-r--r----- 0:2000 k",
		}},
		{"downwardAPI", downwardVolume(
			fieldItem("labels", "metadata.labels"), fieldItem("annotations", "metadata.annotations"), fieldItem("me/name", "metadata.name"),
			fieldItem("me/namespace", "metadata.namespace"), fieldItem("me/uid", "metadata.uid"),
			fieldItem("tier", "metadata.labels['tier']"), fieldItem("note", "metadata.annotations['note']"), fieldItem("none", "metadata.labels['none']"),
		), plugins.MounterArgs{}, map[string]string{
			"labels":      "-rw-r--r-- 0:0 app=\"web\"\ntier=\"front\"",
			"annotations": `-rw-r--r-- 0:0 note="two\nlines and \"quotes\""`,
			"me":          "drwxr-xr-x 0:0", "me/name": "-rw-r--r-- 0:0 web", "me/namespace": "-rw-r--r-- 0:0 shop", "me/uid": "-rw-r--r-- 0:0 4711",
			"tier": "-rw-r--r-- 0:0 front", "note": "-rw-r--r-- 0:0 two\nlines and \"quotes\"", "none": "-rw-r--r-- 0:0 ",
		}},
		{"projected", projectedVolume(
			ofConfigMap("web", item("port", "all/port")), ofSecret("tls", item("key", "all/key")), ofToken("all/token"),
			ofDownward(fieldItem("all/name", "metadata.name")),
		), plugins.MounterArgs{}, map[string]string{
			"all": "drwxr-xr-x 0:0", "all/port": "-rw-r--r-- 0:0 80", "all/key": "-rw-r--r-- 0:0 k", "all/name": "-rw-r--r-- 0:0 web", "all/token": "-rw-r--r-- 0:0 token of 4711 for , 1h0m0s",
		}},
		{"no sources", projectedVolume(), plugins.MounterArgs{}, map[string]string{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			at := h.mount(t, tc.volume, newPod(), tc.args)
			wantContent(t, at, tc.want)
			info := plugintest.Value(os.Stat(at))(t)
			want := os.ModeDir | 0o777
			if tc.volume.ConfigMap == nil {
				want |= os.ModeSticky
			}
			if tc.args.FSGroup != nil {
				want |= os.ModeSetgid
			}
			if info.Mode() != want {
				t.Errorf("got mode %s of the volume, want %s", info.Mode(), want)
			}
		})
	}
}

// TestSamePath: if several sources or items have one path, the content and the mode of the last one
// apply.
func TestSamePath(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"port": "80", "host": "::"})
	h.configMap("more", map[string]string{"port": "81"})
	h.secret("tls", map[string]string{"port": "k"})
	private := item("host", "a")
	private.Mode = new(int32(0o400))
	for _, tc := range []struct {
		name   string
		volume corev1.Volume
		want   map[string]string
	}{
		{"sources", projectedVolume(ofConfigMap("web"), ofConfigMap("more"), ofSecret("tls")), map[string]string{"port": "-rw-r--r-- 0:0 k", "host": "-rw-r--r-- 0:0 ::"}},
		{"items", configMapVolume("web", item("port", "a"), private), map[string]string{"a": "-r-------- 0:0 ::"}},
		{"items, not cleaned", secretVolume("tls", item("port", "a"), item("port", ".//a")), map[string]string{"a": "-rw-r--r-- 0:0 k"}},
		{"an item and a key", projectedVolume(ofSecret("tls", item("port", "host")), ofConfigMap("web")), map[string]string{"port": "-rw-r--r-- 0:0 80", "host": "-rw-r--r-- 0:0 ::"}},
		{"a token", projectedVolume(ofConfigMap("web", item("port", "a")), ofToken("a")), map[string]string{"a": "-rw-r--r-- 0:0 token of 4711 for , 1h0m0s"}},
		{"downward items", downwardVolume(fieldItem("a", "metadata.uid"), fieldItem("a", "metadata.name")), map[string]string{"a": "-rw-r--r-- 0:0 web"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			wantContent(t, h.mount(t, tc.volume, newPod(), plugins.MounterArgs{}), tc.want)
		})
	}
}

// TestDefaultMode: files without a mode of their own have the volume's defaultMode.
func TestDefaultMode(t *testing.T) {
	h := newHost(t)
	h.configMap("run", map[string]string{"start": "#!/bin/sh\n", "stop": ""})
	v := configMapVolume("run")
	v.ConfigMap.DefaultMode = new(int32(0o555))
	wantContent(t, h.mount(t, v, newPod(), plugins.MounterArgs{}), map[string]string{
		"start": "-r-xr-xr-x 0:0 #!/bin/sh\n", "stop": "-r-xr-xr-x 0:0 ",
	})
}

// TestTokenOwner: only the common user of all containers and the fsGroup can read a token. Without them,
// everybody can.
func TestTokenOwner(t *testing.T) {
	user := func(id int64) corev1.Container {
		return corev1.Container{SecurityContext: &corev1.SecurityContext{RunAsUser: &id}}
	}
	group := plugins.MounterArgs{FSGroup: new(int64(2000))}
	for _, tc := range []struct {
		name string
		spec corev1.PodSpec
		args plugins.MounterArgs
		want string
	}{
		{"no user", corev1.PodSpec{Containers: []corev1.Container{{}}}, plugins.MounterArgs{}, "-rw-r--r-- 0:0"},
		{"the pod's user", corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsUser: new(int64(1000))}, Containers: []corev1.Container{{}}}, plugins.MounterArgs{}, "-rw------- 1000:0"},
		{"the containers' user", corev1.PodSpec{InitContainers: []corev1.Container{user(1000)}, Containers: []corev1.Container{user(1000)}}, group, "-rw-r----- 1000:2000"},
		{"two users", corev1.PodSpec{Containers: []corev1.Container{user(1000), user(1001)}}, plugins.MounterArgs{}, "-rw-r--r-- 0:0"},
		{"one container without a user", corev1.PodSpec{Containers: []corev1.Container{user(1000), {}}}, plugins.MounterArgs{}, "-rw-r--r-- 0:0"},
		{"fsGroup", corev1.PodSpec{Containers: []corev1.Container{{}}}, group, "-rw-r----- 0:2000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, pod := newHost(t), newPod()
			pod.Spec = tc.spec
			source := ofToken("token")
			source.ServiceAccountToken.Audience, source.ServiceAccountToken.ExpirationSeconds = "vault", new(int64(600))
			at := h.mount(t, projectedVolume(source), pod, tc.args)
			wantContent(t, at, map[string]string{"token": tc.want + " token of 4711 for vault, 10m0s"})
		})
	}
}

// TestOptional: a missing object or key is an error and leaves nothing, unless the source is optional.
func TestOptional(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"port": "80"})
	h.secret("tls", map[string]string{"key": "k"})
	for _, tc := range []struct {
		name    string
		volume  corev1.Volume
		want    string // the only file if the source is optional; "" for none
		wantErr string // a part of the error if the source is not optional
	}{
		{name: "no ConfigMap", volume: configMapVolume("other"), wantErr: "configMap: ConfigMap shop/other: no manifest has it"},
		{name: "no Secret", volume: secretVolume("other"), wantErr: "secret: Secret shop/other: no manifest has it"},
		{name: "no key", volume: configMapVolume("web", item("port", "port"), item("host", "host")), want: "port", wantErr: `configMap.items[1].key "host": ConfigMap shop/web has no such key`},
		{name: "no key of a Secret", volume: secretVolume("tls", item("key", "key"), item("cert", "cert")), want: "key", wantErr: `secret.items[1].key "cert": Secret shop/tls has no such key`},
		{name: "projected", volume: projectedVolume(ofToken("token"), ofSecret("other")), want: "token", wantErr: "projected.sources[1].secret: Secret shop/other"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := h.setUp(t, tc.volume, newPod(), plugins.MounterArgs{})
			plugintest.WantError(t, err, tc.wantErr, "optional")
			wantRemoved(t, h.Paths().PodVolume("4711", h.plugin(t, tc.volume).Name(), "data"))
			setOptional(&tc.volume)
			at := h.mount(t, tc.volume, newPod(), plugins.MounterArgs{})
			if got := content(t, at); len(got) > 1 || tc.want != "" && got[tc.want] == "" {
				t.Errorf("got content %q, want only the file %q", got, tc.want)
			}
		})
	}
}

// setOptional makes the source of a volume, or the second source of a projected volume, optional.
func setOptional(v *corev1.Volume) {
	switch {
	case v.ConfigMap != nil:
		v.ConfigMap.Optional = new(true)
	case v.Secret != nil:
		v.Secret.Optional = new(true)
	case v.Projected != nil:
		v.Projected.Sources[1].Secret.Optional = new(true)
	}
}

// TestInvalid: NewMounter or SetUp returns an InvalidError that names the field.
func TestInvalid(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"port": "80", "host": "::"})
	h.configMap("paths", map[string]string{"../../etc/passwd": "root::"})
	h.secret("tls", map[string]string{"port": "k"})
	mode := item("port", "port")
	mode.Mode = new(int32(0o1000))
	defaultMode := secretVolume("tls")
	defaultMode.Secret.DefaultMode = new(int32(-1))
	two := ofToken("token")
	two.Secret = ofSecret("tls").Secret
	short, long := ofToken("token"), ofToken("token")
	short.ServiceAccountToken.ExpirationSeconds, long.ServiceAccountToken.ExpirationSeconds = new(int64(599)), new(int64(1<<32+1))
	for _, tc := range []struct {
		name    string
		volume  corev1.Volume
		wantErr string
	}{
		{"absolute path", configMapVolume("web", item("port", "/etc/port")), `configMap.items[0].path "/etc/port"`},
		{"path out of the volume", configMapVolume("web", item("port", "a/../../port")), `configMap.items[0].path`},
		{"path with ..", configMapVolume("web", item("port", "a/../port")), `configMap.items[0].path`},
		{"hidden path", secretVolume("tls", item("port", "..data/port")), `secret.items[0].path "..data/port"`},
		{"hidden path after a dot", secretVolume("tls", item("port", "./..data/port")), `secret.items[0].path`},
		{"no path", secretVolume("tls", item("port", "")), `secret.items[0].path ""`},
		{"the volume itself", secretVolume("tls", item("port", "./")), `secret.items[0].path "./"`},
		{"zero byte", secretVolume("tls", item("port", "a\x00b")), `secret.items[0].path`},
		{"long name", secretVolume("tls", item("port", strings.Repeat("a", 256))), "256 bytes"},
		{"long path", secretVolume("tls", item("port", strings.Repeat("a/", 1500)+"a")), "3001 bytes"},
		{"token's path", projectedVolume(ofToken("../token")), `projected.sources[0].serviceAccountToken.path "../token"`},
		{"downward path", downwardVolume(fieldItem("../x", "metadata.name")), `downwardAPI.items[0].path "../x"`},
		{"key that is a path", configMapVolume("paths"), `key "../../etc/passwd"`},
		{"mode with other bits", configMapVolume("web", mode), "configMap.items[0].mode 01000"},
		{"negative default mode", defaultMode, "defaultMode -01"},
		{"no name", configMapVolume(""), "configMap: the name is missing"},
		{"two projected items at one path", projectedVolume(ofConfigMap("web", item("port", "a")), ofSecret("tls", item("port", "a"))), `projected.sources[1]: path "a": another item has the same path`},
		{"two downward items at one path", projectedVolume(ofDownward(fieldItem("a", "metadata.name"), fieldItem("a", "metadata.uid"))), `projected.sources[0]: path "a"`},
		{"file at the path of a directory", configMapVolume("web", item("port", "a/b"), item("host", "a")), `path "a"`},
		{"directory at the path of a file", configMapVolume("web", item("port", "a"), item("host", "a/b/c")), `path "a/b/c"`},
		{"no source", projectedVolume(corev1.VolumeProjection{}), "projected.sources[0]: want one of"},
		{"two sources", projectedVolume(two), "projected.sources[0]: want one of"},
		{"trust bundle", projectedVolume(corev1.VolumeProjection{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{}}), "clusterTrustBundle"},
		{"pod certificate", projectedVolume(corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{}}), "podCertificate"},
		{"short token", projectedVolume(short), "expirationSeconds 599"},
		{"long token", projectedVolume(long), "expirationSeconds 4294967297"},
		{"no field", downwardVolume(corev1.DownwardAPIVolumeFile{Path: "x"}), "downwardAPI.items[0]: want one of"},
		{"unknown field", downwardVolume(fieldItem("x", "spec.nodeName")), `fieldPath "spec.nodeName"`},
		{"field of another version", downwardVolume(corev1.DownwardAPIVolumeFile{Path: "x", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v2", FieldPath: "metadata.name"}}), `apiVersion "v2"`},
		{"name with a slash", corev1.Volume{Name: "../data", VolumeSource: configMapVolume("web").VolumeSource}, `volume "../data"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := h.setUp(t, tc.volume, newPod(), plugins.MounterArgs{})
			plugintest.WantInvalid(t, err, tc.wantErr)
			plugintest.WantEntries(t, h.Root, 0)
		})
	}
}

// resourceItem returns an item with the path value. An empty divisor is the default.
func resourceItem(container, name, divisor string) corev1.DownwardAPIVolumeFile {
	s := &corev1.ResourceFieldSelector{ContainerName: container, Resource: name}
	if divisor != "" {
		s.Divisor = resource.MustParse(divisor)
	}
	return corev1.DownwardAPIVolumeFile{Path: "value", ResourceFieldRef: s}
}

// TestResources: values are rounded up. A missing request has the value of the limit. A missing limit has
// the value of the machine.
func TestResources(t *testing.T) {
	pod := newPod()
	pod.Spec.InitContainers = []corev1.Container{{Name: "init", Resources: corev1.ResourceRequirements{Limits: quantities("cpu", "1500m", "hugepages-2Mi", "4Mi")}}}
	pod.Spec.Containers = []corev1.Container{{Name: "web", Resources: corev1.ResourceRequirements{
		Limits: quantities("cpu", "1500m", "memory", "100M"), Requests: quantities("memory", "50M", "ephemeral-storage", "7Ei"),
	}}, {Name: "free"}}
	for _, tc := range []struct{ container, resource, divisor, want string }{
		{"web", "limits.cpu", "", "2"},
		{"web", "limits.cpu", "1m", "1500"},
		{"web", "requests.cpu", "1m", "1500"},
		{"web", "limits.memory", "", "100000000"},
		{"web", "limits.memory", "1Mi", "96"},
		{"web", "requests.memory", "1M", "50"},
		{"web", "requests.ephemeral-storage", "1Ei", "7"},
		{"init", "requests.hugepages-2Mi", "1Mi", "4"},
		{"free", "requests.memory", "", "0"},
	} {
		t.Run(tc.resource+" of "+tc.container+" by "+cmp.Or(tc.divisor, "default divisor"), func(t *testing.T) {
			at := newHost(t).mount(t, downwardVolume(resourceItem(tc.container, tc.resource, tc.divisor)), pod, plugins.MounterArgs{})
			wantContent(t, at, map[string]string{"value": "-rw-r--r-- 0:0 " + tc.want})
		})
	}
	for _, of := range []string{"limits.cpu", "limits.memory", "limits.ephemeral-storage"} {
		t.Run("without a limit, "+of, func(t *testing.T) {
			at := newHost(t).mount(t, downwardVolume(resourceItem("free", of, "")), pod, plugins.MounterArgs{})
			if got := content(t, at)["value"]; strings.HasSuffix(got, " 0") || strings.HasSuffix(got, " ") {
				t.Errorf("got %q, want the value of the machine", got)
			}
		})
	}
	for name, tc := range map[string]struct{ container, resource, divisor, wantErr string }{
		"unknown container":             {"other", "limits.cpu", "", `containerName "other"`},
		"unknown resource":              {"web", "limits.gpu", "", `resource "limits.gpu"`},
		"neither a request nor a limit": {"web", "cpu", "", `resource "cpu"`},
		"invalid divisor of CPU":        {"web", "limits.cpu", "2", `divisor "2"`},
		"invalid divisor of memory":     {"web", "limits.memory", "1m", `divisor "1m"`},
		"negative divisor":              {"web", "limits.memory", "-1", `divisor "-1"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := newHost(t).setUp(t, downwardVolume(resourceItem(tc.container, tc.resource, tc.divisor)), pod, plugins.MounterArgs{})
			plugintest.WantInvalid(t, err, tc.wantErr)
		})
	}
}

// quantities returns the resources with these names and quantities, which alternate.
func quantities(words ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i < len(words); i += 2 {
		list[corev1.ResourceName(words[i])] = resource.MustParse(words[i+1])
	}
	return list
}

// TestTokenRefreshed: each SetUp requests a new token.
func TestTokenRefreshed(t *testing.T) {
	h, token := newHost(t), "first"
	h.Tokens = func() string { return token }
	v := projectedVolume(ofToken("token"))
	at := h.mount(t, v, newPod(), plugins.MounterArgs{})
	token = "second"
	h.mount(t, v, newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"token": "-rw-r--r-- 0:0 second"})
}
