{{/* Prefix of the names of this release's objects: the name of the release, followed by the name of the
chart unless the name of the release contains it. */}}
{{- define "trivet.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select all pods of the release. They must never change. */}}
{{- define "trivet.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ toYaml .Release.Name }}
{{- end -}}

{{- define "trivet.labels" -}}
{{ include "trivet.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- if not .Values.plainManifests }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}
{{- end -}}

{{/* Name of the DaemonSet and the other objects of the nodes. With shape oneNode there are no others. */}}
{{- define "trivet.node" -}}
{{- include "trivet.fullname" . -}}{{- if ne .Values.shape "oneNode" -}}-node{{- end -}}
{{- end -}}

{{- define "trivet.nodeSelectorLabels" -}}
{{ include "trivet.selectorLabels" . }}
{{- if ne .Values.shape "oneNode" }}
app.kubernetes.io/component: node
{{- end }}
{{- end -}}

{{- define "trivet.nodeServiceAccount" -}}
{{- .Values.node.serviceAccount.name | default (include "trivet.node" .) -}}
{{- end -}}

{{/* Name of the Deployment and the other objects of the controller, which shape oneNode does not have. */}}
{{- define "trivet.controller" -}}
{{- include "trivet.fullname" . -}}-controller
{{- end -}}

{{- define "trivet.controllerSelectorLabels" -}}
{{ include "trivet.selectorLabels" . }}
app.kubernetes.io/component: controller
{{- end -}}

{{- define "trivet.controllerServiceAccount" -}}
{{- .Values.controller.serviceAccount.name | default (include "trivet.controller" .) -}}
{{- end -}}

{{/* Name of the ServiceAccount that makes the copies of protected claims. */}}
{{- define "trivet.protection" -}}
{{- include "trivet.fullname" . -}}-protection
{{- end -}}

{{/* Name of the Secret and the ConfigMap of the CA. */}}
{{- define "trivet.authority" -}}
{{- include "trivet.fullname" . -}}-ca
{{- end -}}

{{/* Name of the ConfigMap where the controller records which node has which pool. */}}
{{- define "trivet.poolOwners" -}}
{{- include "trivet.fullname" . -}}-pools
{{- end -}}

{{/* Name of the Service of csi-snapshot-metadata. */}}
{{- define "trivet.snapshotMetadata" -}}
{{- include "trivet.fullname" . -}}-snapshot-metadata
{{- end -}}

{{/* A node selector with kubernetes.io/os: linux added. */}}
{{- define "trivet.linux" -}}
{{- merge (dict "kubernetes.io/os" "linux") . | toYaml -}}
{{- end -}}

{{/* Image of the driver. */}}
{{- define "trivet.image" -}}
{{- $i := .Values.image -}}
{{- printf "%s/%s:%s" $i.registry $i.repository ($i.tag | default (printf "v%s" .Chart.AppVersion)) -}}
{{- with $i.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Image of a sidecar: dict "root" $ "name" its key in .Values.sidecars. */}}
{{- define "trivet.sidecarImage" -}}
{{- $s := index .root.Values.sidecars .name -}}
{{- printf "%s/%s:%s" .root.Values.sidecars.registry $s.repository $s.tag -}}
{{- with $s.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* The pools with their names, as a JSON list. The pool default is the first, because StorageClasses
without a pool use the first pool. The others are sorted by name. A pool that is null is omitted. If
pools is an empty list, there are none. */}}
{{- define "trivet.pools" -}}
{{- include "trivet.checkPoolMap" . -}}
{{- $given := ternary dict .Values.pools (kindIs "slice" .Values.pools) -}}
{{- $pools := list -}}
{{- range $name := prepend (without (keys $given | sortAlpha) "default") "default" -}}
{{- $pool := get $given $name -}}
{{- if kindIs "map" $pool }}{{ $pools = append $pools (merge (dict "name" $name) $pool) }}{{ end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* "true" if NFS volumes are enabled, otherwise empty. */}}
{{- define "trivet.nfs" -}}
{{- $pools := false -}}
{{- range include "trivet.pools" . | fromJsonArray }}{{ if .nfs }}{{ $pools = true }}{{ end }}{{ end -}}
{{- if or $pools .Values.nfs.enabled .Values.nfs.server .Values.nfs.storageClasses }}true{{ end -}}
{{- end -}}

{{/* "true" if the controller's pod uses the network of its node, otherwise empty. */}}
{{- define "trivet.controllerOnHost" -}}
{{- if and .Values.nfs.kerberos (include "trivet.nfs" .) (ne .Values.shape "oneNode") }}true{{ end -}}
{{- end -}}

{{/* A port of a pod: dict "root" $ "pod" "node" or "controller" "name" "metrics" or "health". */}}
{{- define "trivet.port" -}}
{{- $onHost := and (eq .pod "controller") (include "trivet.controllerOnHost" .root) -}}
{{- index .root.Values.ports (ternary (printf "controller%s" (title .name)) .name (not (empty $onHost))) -}}
{{- end -}}

{{/* volumeLifecycleModes of the CSIDriver object. */}}
{{- define "trivet.lifecycleModes" -}}
Persistent{{ if .Values.ephemeral.enabled }}, Ephemeral{{ end }}
{{- end -}}

{{/* A pool in the driver's configuration. Helm converts numbers to floats, so without int64 a large
number would be written as 1e+06. */}}
{{- define "trivet.poolConfig" -}}
{{- $pool := omit . "storageClasses" -}}
{{- if hasKey $pool "maxVolumes" }}{{ $pool = set $pool "maxVolumes" (int64 $pool.maxVolumes) }}{{ end -}}
- {{ toYaml $pool | nindent 2 | trim }}
{{- end -}}

{{/* Configuration of a node's driver. */}}
{{- define "trivet.nodeConfig" -}}
pools:
{{- range include "trivet.pools" . | fromJsonArray }}
{{ include "trivet.poolConfig" . }}
{{- else }} []
{{- end }}
maxVolumesPerNode: {{ int64 .Values.config.maxVolumesPerNode }}
{{- with .Values.ephemeral.memory }}
ephemeralMemory: {{ toYaml . }}
{{- end }}
pprof: {{ .Values.config.pprof }}
{{- if ne .Values.shape "oneNode" }}
transferLimit:
  bytesPerSecond: {{ .Values.config.transferLimit.bytesPerSecond | quote }}
  streams: {{ int64 .Values.config.transferLimit.streams }}
forwarding:
  listen: ":{{ .Values.ports.forwarding }}"
{{- end }}
kubernetes:
  kubeletDir: {{ .Values.kubeletDir }}
  startupTaint: {{ .Values.config.startupTaint }}
  nfs: {{ not (empty (include "trivet.nfs" .)) }}
{{- if eq .Values.shape "oneNode" }}
  events: true
{{- else }}
  authority: {{ include "trivet.authority" . }}
{{- end }}
{{- end -}}

{{/* Configuration of the controller's driver. It contains only the nfs pools. */}}
{{- define "trivet.controllerConfig" -}}
{{- $shared := list -}}
{{- range include "trivet.pools" . | fromJsonArray }}{{ if .nfs }}{{ $shared = append $shared . }}{{ end }}{{ end -}}
{{- with $shared -}}
pools:
{{- range . }}
{{ include "trivet.poolConfig" . }}
{{- end }}
{{ end -}}
pprof: {{ .Values.config.pprof }}
forwarding: {}
kubernetes:
  authority: {{ include "trivet.authority" . }}
  nodeService: {{ include "trivet.node" . }}
  nodeServiceAccount: {{ include "trivet.nodeServiceAccount" . | toYaml }}
  poolOwners: {{ include "trivet.poolOwners" . }}
  events: true
{{- if .Values.controller.nodeLoss.enabled }}
  nodeLossDelay: {{ .Values.controller.nodeLoss.delay }}
{{- end }}
{{- if .Values.protection.enabled }}
  protectClaims: true
{{- end }}
{{- end -}}

{{/* The host directories to mount into the driver's container for the pools, as a JSON list. Each is the
parent of a pool's directory. If a pool's directory itself were mounted, it would always be a mount
point, so requireMount would have no effect, and the driver would not see a disk that is mounted there
later. Only if the parent is / or contains the kubelet's directory or the state directory, the pool's
directory itself is mounted. Directories inside others are omitted. */}}
{{- define "trivet.poolMounts" -}}
{{- $dirs := list -}}
{{- $wide := list "/" -}}
{{- range list .Values.kubeletDir .Values.stateDir }}
{{- $at := clean . -}}
{{- range until 32 }}{{ if ne $at "/" }}{{ $at = dir $at }}{{ $wide = append $wide $at }}{{ end }}{{ end -}}
{{- end -}}
{{- range include "trivet.pools" . | fromJsonArray }}
{{- if .directory -}}
{{- $path := clean .directory.path -}}
{{- $above := dir $path -}}
{{- $dirs = append $dirs (ternary $path $above (has $above $wide)) -}}
{{- end -}}
{{- end -}}
{{- $kept := list (clean .Values.stateDir) -}}
{{- range sortAlpha (uniq $dirs) }}
{{- $inside := false -}}
{{- $dir := . -}}
{{- range $kept }}{{ if or (eq $dir .) (hasPrefix (printf "%s/" .) $dir) }}{{ $inside = true }}{{ end }}{{ end -}}
{{- if not $inside }}{{ $kept = append $kept $dir }}{{ end -}}
{{- end -}}
{{- rest $kept | toJson -}}
{{- end -}}

{{/* true if a pool is a volume group, else empty. */}}
{{- define "trivet.volumeGroups" -}}
{{- range include "trivet.pools" . | fromJsonArray }}{{ if .lvm }}true{{ end }}{{ end -}}
{{- end -}}

{{/* The keys of pools that only one backend can use, as JSON: the backend, what such a pool is, and what
its volumes are. */}}
{{- define "trivet.media" -}}
{"disks": {"backend": "disk", "pool": "a pool of disks", "volumes": "whole disks"},
 "lvm": {"backend": "lvm", "pool": "a pool of a volume group", "volumes": "logical volumes"}}
{{- end -}}

{{/* All StorageClasses, as a JSON list. Each has the backend, and the pool or the export of the section
that contains it. shared is true if all nodes can access the volumes. medium is the key of trivet.media
that the pool has. */}}
{{- define "trivet.storageClasses" -}}
{{- $classes := list -}}
{{- $media := include "trivet.media" . | fromJson -}}
{{- range $pool := include "trivet.pools" . | fromJsonArray }}
{{- $shared := not (empty $pool.nfs) -}}
{{- $default := ternary "nfs" "loop" $shared -}}
{{- $medium := "" -}}
{{- range $key, $m := $media }}{{ if get $pool $key }}{{ $medium = $key }}{{ $default = $m.backend }}{{ end }}{{ end -}}
{{- range ($pool.storageClasses | default list) }}
{{- $classes = append $classes (merge (dict "pool" $pool.name "shared" $shared "medium" $medium "backend" (.backend | default $default)) .) -}}
{{- end -}}
{{- end -}}
{{- $nfs := .Values.nfs -}}
{{- range $nfs.storageClasses | default (ternary (list (dict "name" "trivet-nfs")) list (not (empty $nfs.server))) }}
{{- $classes = append $classes (merge (dict "shared" true "medium" "" "backend" (.backend | default "nfs") "server" (.server | default $nfs.server) "export" (.export | default $nfs.export)) .) -}}
{{- end -}}
{{- $classes | toJson -}}
{{- end -}}

{{/* The class for `helm test`, as JSON: the first one whose volumes are deleted with their claims. Each
test would leave a volume of another class behind. null if there is none. */}}
{{- define "trivet.testClass" -}}
{{- $found := list -}}
{{- range include "trivet.storageClasses" . | fromJsonArray }}
{{- $kept := or (eq (.reclaimPolicy | default "Delete") "Retain") (ne (dig "parameters" "onDelete" "delete" .) "delete") -}}
{{- if not $kept }}{{ $found = append $found . }}{{ end -}}
{{- end -}}
{{- first $found | toJson -}}
{{- end -}}

{{/* Parameters of a StorageClass, which is an item of trivet.storageClasses. */}}
{{- define "trivet.classParameters" -}}
{{- $p := dict "backend" .backend -}}
{{- if .pool }}{{ $p = set $p "pool" .pool }}{{ else }}{{ $p = merge $p (dict "server" .server "share" .export) }}{{ end -}}
{{- if eq .backend "loop" -}}
{{- $p = merge $p (dict "csi.storage.k8s.io/fstype" (.fsType | default "ext4") "allocation" (.allocation | default "thin")) -}}
{{- end -}}
{{- if and .medium .fsType -}}{{- $p = set $p "csi.storage.k8s.io/fstype" .fsType -}}{{- end -}}
{{- merge $p (.parameters | default dict) | toYaml -}}
{{- end -}}

{{/* volumeBindingMode of a StorageClass. If all nodes can access the volumes, a claim need not wait for
its pod. */}}
{{- define "trivet.bindingMode" -}}
{{- .volumeBindingMode | default (ternary "Immediate" "WaitForFirstConsumer" .shared) -}}
{{- end -}}
