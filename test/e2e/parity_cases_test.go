//go:build e2e

package e2e

import (
	"fmt"
	"strings"
)

// parityCase describes a pod that both the kubelet and the volume manager set up.
type parityCase struct {
	name string
	// objects contains the manifests of objects that the pod needs. HOST stands for a directory of the
	// node, which differs for the kubelet and the manager.
	objects string
	// spec and container are additional fields of the pod's spec and of its container.
	spec, container string
	// volumes contains the elements of the pod's spec.volumes. Each begins with its name.
	volumes []string
	// refused is true if the kubelet and the manager must refuse the pod or one of its volumes.
	refused bool
}

// manifest returns the manifests of the objects and of the pod.
func (c parityCase) manifest(node string) string {
	return c.objects + fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata:
  name: %s
  labels: {app: shop, quoted: "1.0"}
  annotations: {note: "two\nlines, \"quoted\"", example.org/Empty: ""}
spec:
  automountServiceAccountToken: false
  dnsPolicy: Default
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  %s
  containers:
  - {name: main, image: "docker.io/library/busybox:1.37", command: [sleep, "1000000"], %s}
  volumes: [%s]
---
`, c.name, node, c.spec, c.main(), strings.Join(c.volumes, ", "))
}

// main returns the fields of the container. It mounts all volumes unless the case selects some, because a
// kubelet only sets up volumes that a container uses.
func (c parityCase) main() string {
	if strings.Contains(c.container, "volumeMounts:") || strings.Contains(c.container, "volumeDevices:") {
		return c.container
	}
	var mounts []string
	for _, v := range c.volumes {
		name, _, _ := strings.Cut(strings.TrimPrefix(v, "{name: "), ",")
		mounts = append(mounts, fmt.Sprintf("{name: %[1]s, mountPath: /mnt/%[1]s}", name))
	}
	return strings.Join([]string{"volumeMounts: [" + strings.Join(mounts, ", ") + "]", c.container}, ", ")
}

// parityObjects are objects that several pods use.
const parityObjects = `
{apiVersion: v1, kind: ConfigMap, metadata: {name: settings}, data: {port: "80", host: "::\n", empty: ""}, binaryData: {bin: AAEC}}
---
{apiVersion: v1, kind: Secret, metadata: {name: keys}, stringData: {port: secret, password: "p w"}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: changing}, data: {value: old, removed: x}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: subpath-becomes-key}, data: {value: old}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: fixed}, immutable: true, data: {value: old}}
---
{apiVersion: v1, kind: Secret, metadata: {name: fixed}, immutable: true, stringData: {value: old}}
---
`

// parityChanges replace parityObjects. The API server refuses changes of immutable objects, and the manager
// must ignore them.
var parityChanges = []struct {
	manifest string
	refused  bool // by the API server
}{
	{"{apiVersion: v1, kind: ConfigMap, metadata: {name: fixed}, immutable: true, data: {value: new}}", true},
	{"{apiVersion: v1, kind: Secret, metadata: {name: fixed}, immutable: true, stringData: {value: new}}", true},
	{"{apiVersion: v1, kind: ConfigMap, metadata: {name: subpath-becomes-key}, data: {value: new, subpath: file}}", false},
	{"{apiVersion: v1, kind: ConfigMap, metadata: {name: changing}, data: {value: new, added: x}}", false},
}

const (
	emptyDirData = "{name: data, emptyDir: {}}"
	settings     = "{name: data, configMap: {name: settings}}"
)

// mountedData returns the volumeMount of the volume "data", with additional fields.
func mountedData(more string) string {
	return fmt.Sprintf("volumeMounts: [{name: data, mountPath: /data, %s}]", more)
}

// expression returns a container with a subPathExpr and environment variables.
func expression(expression string, env ...string) string {
	return mountedData(fmt.Sprintf("subPathExpr: %q", expression)) + fmt.Sprintf(", env: [%s]", strings.Join(env, ", "))
}

// fieldEnv, keyEnv and resourceEnv return environment variables with a value from the pod, from a key of a
// ConfigMap or Secret, and from a resource of the container. more contains additional fields.
func fieldEnv(name, path string) string {
	return fmt.Sprintf(`{name: %s, valueFrom: {fieldRef: {fieldPath: "%s"}}}`, name, path)
}

func keyEnv(name, kind, object, key, more string) string {
	return fmt.Sprintf("{name: %s, valueFrom: {%sKeyRef: {name: %s, key: %s%s}}}", name, kind, object, key, more)
}

func resourceEnv(name, of, more string) string {
	return fmt.Sprintf("{name: %s, valueFrom: {resourceFieldRef: {resource: %s%s}}}", name, of, more)
}

// podItems are the items of a downwardAPI volume, limited is the resources of a container, and allOf are the
// sources of a projected volume.
const (
	podItems = `items: [
    {path: meta/name, fieldRef: {fieldPath: metadata.name}}, {path: meta/namespace, fieldRef: {fieldPath: metadata.namespace}},
    {path: meta/uid, fieldRef: {fieldPath: metadata.uid}}, {path: labels, fieldRef: {fieldPath: metadata.labels}},
    {path: annotations, mode: 256, fieldRef: {fieldPath: metadata.annotations}}, {path: app, fieldRef: {fieldPath: "metadata.labels['app']"}},
    {path: none, fieldRef: {fieldPath: "metadata.labels['none']"}}, {path: memory, resourceFieldRef: {containerName: main, resource: limits.memory, divisor: 1Mi}},
    {path: cpu, resourceFieldRef: {containerName: main, resource: requests.cpu, divisor: 1m}}]`
	limited = `resources: {limits: {cpu: 300m, memory: 32Mi}}`
	allOf   = `{configMap: {name: settings, items: [{key: port, path: conf/port}, {key: bin, path: conf/bin, mode: 493}]}},
    {secret: {name: keys}}, {serviceAccountToken: {path: token, audience: them}}, {downwardAPI: {items: [{path: me, fieldRef: {fieldPath: metadata.name}}]}}`
)

// payloads contains volumes of each kind whose content comes from API objects.
var payloads = []string{
	"{name: all-keys, configMap: {name: settings}}",
	"{name: some-keys, configMap: {name: settings, defaultMode: 384, items: [{key: port, path: a/b/port}, {key: host, path: host, mode: 511}]}}",
	"{name: no-object, configMap: {name: none, optional: true}}",
	"{name: no-key, configMap: {name: settings, optional: true, items: [{key: none, path: none}, {key: port, path: port}]}}",
	"{name: keys, secret: {secretName: keys}}",
	"{name: closed-keys, secret: {secretName: keys, defaultMode: 256}}",
	"{name: pod, downwardAPI: {" + podItems + "}}",
	"{name: everything, projected: {defaultMode: 288, sources: [" + allOf + "]}}",
}

// hostClaim is a PersistentVolume for a directory of the node, and its claim.
const hostClaim = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: parity-%[1]s}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: parity
  claimRef: {namespace: parity, name: %[1]s}
  local: {path: HOST/%[1]s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: Exists}]}]}}
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %[1]s}, spec: {storageClassName: parity, volumeName: parity-%[1]s, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}
`

// driverClaim returns a claim for a volume of the driver.
func driverClaim(name, mode, size string) string {
	return fmt.Sprintf("{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %s}, spec: {storageClassName: trivet-loop, volumeMode: %s, accessModes: [ReadWriteOnce], resources: {requests: {storage: %s}}}}\n", name, mode, size)
}

// claimVolume returns a volume "data" that uses a claim.
func claimVolume(name string) string {
	return fmt.Sprintf("{name: data, persistentVolumeClaim: {claimName: %s}}", name)
}

var parityCases = []parityCase{
	// Volumes whose content comes from API objects.
	{name: "payload", container: limited, volumes: payloads},
	{name: "payload-group", container: limited, spec: "securityContext: {fsGroup: 4711, runAsUser: 1000}", volumes: payloads},
	{name: "payload-user", container: limited, spec: "securityContext: {runAsUser: 1000}", volumes: payloads},
	{name: "payload-without-limits", volumes: []string{"{name: data, downwardAPI: {items: [{path: cpu, resourceFieldRef: {containerName: main, resource: limits.cpu}}, {path: memory, resourceFieldRef: {containerName: main, resource: limits.memory}}, {path: storage, resourceFieldRef: {containerName: main, resource: limits.ephemeral-storage}}]}}"}},
	{name: "payload-missing", refused: true, volumes: []string{"{name: data, configMap: {name: none}}"}},
	{name: "payload-key-missing", refused: true, volumes: []string{"{name: data, secret: {secretName: keys, items: [{key: none, path: none}]}}"}},
	{name: "same-path-sources", volumes: []string{"{name: data, projected: {sources: [{configMap: {name: settings}}, {secret: {name: keys}}]}}"}},
	{name: "same-path-items", volumes: []string{"{name: data, configMap: {name: settings, items: [{key: port, path: same}, {key: host, path: same}]}}"}},
	{name: "changing", volumes: []string{"{name: data, configMap: {name: changing}}", "{name: part, configMap: {name: changing}}"}, container: "volumeMounts: [{name: data, mountPath: /data}, {name: part, mountPath: /part, subPath: value}]"},
	{name: "fixed", volumes: []string{"{name: map, configMap: {name: fixed}}", "{name: secret, secret: {secretName: fixed}}"}},
	{name: "subpath-becomes-key", volumes: []string{"{name: data, configMap: {name: subpath-becomes-key}}"}, container: mountedData("subPath: subpath")},

	{name: "unused", volumes: []string{emptyDirData}, container: "volumeMounts: []"},

	// emptyDir.
	{name: "empty", volumes: []string{emptyDirData, "{name: memory, emptyDir: {medium: Memory}}", "{name: small, emptyDir: {medium: Memory, sizeLimit: 4Mi}}"}},
	{name: "empty-limited", container: limited, volumes: []string{"{name: memory, emptyDir: {medium: Memory}}", "{name: small, emptyDir: {medium: Memory, sizeLimit: 4Mi}}", "{name: large, emptyDir: {medium: Memory, sizeLimit: 1Gi}}"}},
	{name: "empty-group", spec: "securityContext: {fsGroup: 4711}", volumes: []string{emptyDirData, "{name: memory, emptyDir: {medium: Memory, sizeLimit: 4Mi}}"}},

	// subPath.
	{name: "part", volumes: []string{emptyDirData, settingsNamed("config")}, spec: "securityContext: {fsGroup: 4711}", container: `volumeMounts: [
      {name: data, mountPath: /a, subPath: a/b}, {name: data, mountPath: /b, subPath: ./a/c/}, {name: data, mountPath: /c, subPath: ., readOnly: true},
      {name: config, mountPath: /d, subPath: port}, {name: config, mountPath: /e, subPath: missing}]`},
	{name: "part-of-memory", volumes: []string{"{name: data, emptyDir: {medium: Memory, sizeLimit: 4Mi}}"}, container: mountedData("subPath: a/b")},
	{name: "part-through-link", objects: fmt.Sprintf(hostClaim, "linked"), volumes: []string{claimVolume("linked")}, container: mountedData("subPath: inside/new")},
	{name: "part-out", refused: true, objects: fmt.Sprintf(hostClaim, "leads-out"), volumes: []string{claimVolume("leads-out")}, container: mountedData("subPath: outside/new")},
	{name: "part-below-file", refused: true, objects: fmt.Sprintf(hostClaim, "has-file"), volumes: []string{claimVolume("has-file")}, container: mountedData("subPath: file/new")},

	// subPathExpr.
	{name: "expr-fields", volumes: []string{emptyDirData}, container: expression("$(NODE)/$(NAME)-$(SPACE)/$(APP)/$(ACCOUNT)",
		fieldEnv("NODE", "spec.nodeName"), fieldEnv("NAME", "metadata.name"), fieldEnv("SPACE", "metadata.namespace"), fieldEnv("APP", "metadata.labels['app']"), fieldEnv("ACCOUNT", "spec.serviceAccountName"))},
	{name: "expr-syntax", volumes: []string{emptyDirData}, container: expression("$$(A)-$A-$(A)-$(A-$", "{name: A, value: one}")},
	{name: "expr-values", volumes: []string{emptyDirData}, container: expression("$(TWICE)/$(BEFORE)/$(LATE)/$(MIXED)",
		"{name: TWICE, value: first}", `{name: BEFORE, value: "is-$(TWICE)"}`, "{name: TWICE, value: second}", `{name: LATE, value: "$(LATER)"}`, "{name: LATER, value: x}",
		`{name: EMPTY, value: ""}`, `{name: MIXED, value: "$$(TWICE)$(EMPTY)$(UNDEFINED)"}`)},
	{name: "expr-objects", volumes: []string{emptyDirData}, container: expression("$(PORT)/$(password)/$(M_port)/$(KEY)",
		keyEnv("PORT", "configMap", "settings", "port", ""), keyEnv("KEY", "secret", "keys", "port", ""),
		keyEnv("PORT", "configMap", "none", "none", ", optional: true"), keyEnv("PORT", "secret", "keys", "none", ", optional: true")) +
		", envFrom: [{secretRef: {name: keys}}, {prefix: M_, configMapRef: {name: settings}}, {configMapRef: {name: none, optional: true}}]"},
	{name: "expr-resources", volumes: []string{emptyDirData}, container: limited + ", " + expression("$(CPU)/$(MEMORY)/$(REQUEST)",
		resourceEnv("CPU", "limits.cpu", ", divisor: 1m"), resourceEnv("MEMORY", "limits.memory", ", divisor: 1Mi"), resourceEnv("REQUEST", "requests.cpu", ", containerName: main"))},
	{name: "expr-empty", refused: true, volumes: []string{emptyDirData}, container: expression("$(A)", `{name: A, value: ""}`)},
	{name: "expr-empty-part", refused: true, volumes: []string{emptyDirData}, container: expression("a/$(A)", `{name: A, value: ""}`)},
	{name: "expr-no-label", refused: true, volumes: []string{emptyDirData}, container: expression("$(A)", fieldEnv("A", "metadata.labels['none']"))},
	{name: "expr-undefined", refused: true, volumes: []string{emptyDirData}, container: expression("$(A)")},
	{name: "expr-no-map", refused: true, volumes: []string{emptyDirData}, container: expression("x", keyEnv("A", "configMap", "none", "x", ""))},
	{name: "expr-no-key", refused: true, volumes: []string{emptyDirData}, container: expression("x", keyEnv("A", "secret", "keys", "none", ""))},
	{name: "expr-up", refused: true, volumes: []string{emptyDirData}, container: expression("$(A)", "{name: A, value: a/../b}")},
	{name: "expr-absolute", refused: true, volumes: []string{emptyDirData}, container: expression("$(A)", "{name: A, value: /tmp}")},
	{name: "expr-address", volumes: []string{emptyDirData}, container: expression("$(A)", fieldEnv("A", "status.hostIP"))},
	{name: "expr-service", volumes: []string{emptyDirData}, container: expression("$(KUBERNETES_SERVICE_PORT)")},

	// Files of the node.
	{name: "host", volumes: []string{
		"{name: dir, hostPath: {path: HOST/host/dir, type: Directory}}", "{name: new-dir, hostPath: {path: HOST/host/new/dir, type: DirectoryOrCreate}}",
		"{name: file, hostPath: {path: HOST/host/file, type: File}}", "{name: new-file, hostPath: {path: HOST/host/new-file, type: FileOrCreate}}",
		"{name: socket, hostPath: {path: HOST/host/socket, type: Socket}}", "{name: char, hostPath: {path: /dev/null, type: CharDevice}}", "{name: untyped, hostPath: {path: HOST/host/dir}}",
	}},
	{name: "host-no-file", refused: true, volumes: []string{"{name: data, hostPath: {path: HOST/host/dir, type: File}}"}},
	{name: "host-no-dir", refused: true, volumes: []string{"{name: data, hostPath: {path: HOST/host/none, type: Directory}}"}},
	{name: "host-no-parent", refused: true, volumes: []string{"{name: data, hostPath: {path: HOST/host/none/file, type: FileOrCreate}}"}},
	{name: "local", objects: fmt.Sprintf(hostClaim, "files"), volumes: []string{claimVolume("files")}, container: mountedData("")},
	{name: "local-group", objects: fmt.Sprintf(hostClaim, "owned"), volumes: []string{claimVolume("owned")}, container: mountedData(""), spec: "securityContext: {fsGroup: 4711}"},
	{name: "local-group-root", objects: fmt.Sprintf(hostClaim, "owned-by-root"), volumes: []string{claimVolume("owned-by-root")}, container: mountedData(""), spec: "securityContext: {fsGroup: 4711, fsGroupChangePolicy: OnRootMismatch}"},
	{name: "local-missing", refused: true, objects: fmt.Sprintf(hostClaim, "missing"), volumes: []string{claimVolume("missing")}, container: mountedData("")},

	// Volumes of a CSI driver.
	{name: "claim", objects: driverClaim("plain", "Filesystem", "64Mi"), volumes: []string{claimVolume("plain")}, container: mountedData("")},
	{name: "claim-group", objects: driverClaim("grouped", "Filesystem", "64Mi"), volumes: []string{claimVolume("grouped")}, container: mountedData("subPath: a/b"), spec: "securityContext: {fsGroup: 4711}"},
	{name: "claim-read-only", objects: driverClaim("read", "Filesystem", "64Mi"), volumes: []string{"{name: data, persistentVolumeClaim: {claimName: read, readOnly: true}}"}, container: mountedData("")},
	{name: "claim-device", objects: driverClaim("device", "Block", "64Mi"), volumes: []string{claimVolume("device")}, container: "volumeDevices: [{name: data, devicePath: /dev/data}]"},
}

// settingsNamed returns the volume of the constant settings with another name.
func settingsNamed(name string) string { return strings.Replace(settings, "data", name, 1) }
