{{/* Name of what belongs to this release: its own name, or that and the chart's. */}}
{{- define "trivet.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of what belongs to this release and to no namespace: another namespace may
have a release of the same name. Neither half can hold a colon. */}}
{{- define "trivet.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "trivet.fullname" .) -}}
{{- end -}}

{{/* What a selector of all of it may hold: it never changes. */}}
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

{{/* The nodes' half: its DaemonSet and what is named after it. In the one-node shape it
is all there is. */}}
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

{{/* The controller's half, which the one-node shape has not. */}}
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

{{/* Secret and ConfigMap of the CA. */}}
{{- define "trivet.authority" -}}
{{- include "trivet.fullname" . -}}-ca
{{- end -}}

{{/* ConfigMap where the controller records which node has which pool. */}}
{{- define "trivet.poolOwners" -}}
{{- include "trivet.fullname" . -}}-pools
{{- end -}}

{{/* Service of csi-snapshot-metadata. */}}
{{- define "trivet.snapshotMetadata" -}}
{{- include "trivet.fullname" . -}}-snapshot-metadata
{{- end -}}

{{- define "trivet.linux" -}}
{{- merge (dict "kubernetes.io/os" "linux") . | toYaml -}}
{{- end -}}

{{/* Image of the driver. */}}
{{- define "trivet.image" -}}
{{- $i := .Values.image -}}
{{- printf "%s/%s:%s" $i.registry $i.repository ($i.tag | default (printf "v%s" .Chart.AppVersion)) -}}
{{- with $i.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Image of a sidecar: dict "root" $ "name" its key in values. */}}
{{- define "trivet.sidecarImage" -}}
{{- $s := index .root.Values.sidecars .name -}}
{{- printf "%s/%s:%s" .root.Values.sidecars.registry $s.repository $s.tag -}}
{{- with $s.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* The pools with their names, as a JSON list: the default one first, which StorageClasses
without a pool get, then by name. null takes a pool away, an empty list takes all. */}}
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

{{/* "true" where there are NFS volumes, else nothing. */}}
{{- define "trivet.nfs" -}}
{{- $pools := false -}}
{{- range include "trivet.pools" . | fromJsonArray }}{{ if .nfs }}{{ $pools = true }}{{ end }}{{ end -}}
{{- if or $pools .Values.nfs.enabled .Values.nfs.server .Values.nfs.storageClasses }}true{{ end -}}
{{- end -}}

{{/* How long volumes may live: as long as they are claimed, or as their pod. */}}
{{- define "trivet.lifecycleModes" -}}
Persistent{{ if .Values.ephemeral.enabled }}, Ephemeral{{ end }}
{{- end -}}

{{/* A pool as the driver's configuration has it. Numbers come from Helm as floats, and a
large one would be written as 1e+06. */}}
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
forwarding:
  listen: ":{{ .Values.ports.forwarding }}"
{{- end }}
kubernetes:
  kubeletDir: {{ .Values.kubeletDir }}
  startupTaint: {{ .Values.config.startupTaint }}
  nfs: {{ not (empty (include "trivet.nfs" .)) }}
{{- if ne .Values.shape "oneNode" }}
  authority: {{ include "trivet.authority" . }}
{{- end }}
{{- end -}}

{{/* Configuration of the controller's driver: of the pools it has those that are no
node's. */}}
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
{{- end -}}

{{/* The host directories to mount for the pools, as a JSON list. Each is the parent of a
pool's directory: if mounted itself, a pool's directory would always be a mount point, so
requireMount would have no effect, and a disk that is mounted above it later would be invisible.
Only where that would cover half the node (/ or what holds the kubelet's or the
state directory) it is the pool's own. Those inside another are left out. */}}
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

{{/* All StorageClasses, as a JSON list, with the backend and the pool or export of the section that
contains them; shared is true if all nodes can access the volumes. */}}
{{- define "trivet.storageClasses" -}}
{{- $classes := list -}}
{{- range $pool := include "trivet.pools" . | fromJsonArray }}
{{- $shared := not (empty $pool.nfs) -}}
{{- $disks := not (empty $pool.disks) -}}
{{- range ($pool.storageClasses | default list) }}
{{- $classes = append $classes (merge (dict "pool" $pool.name "shared" $shared "disks" $disks "backend" (.backend | default (ternary "nfs" (ternary "disk" "loop" $disks) $shared))) .) -}}
{{- end -}}
{{- end -}}
{{- $nfs := .Values.nfs -}}
{{- range $nfs.storageClasses | default (ternary (list (dict "name" "trivet-nfs")) list (not (empty $nfs.server))) }}
{{- $share := include "trivet.share" (dict "of" . "key" (printf "storageClass %s" .name)) | default (include "trivet.share" (dict "of" $nfs "key" "nfs")) -}}
{{- $classes = append $classes (merge (dict "shared" true "backend" (.backend | default "nfs") "server" (.server | default $nfs.server) "share" $share) .) -}}
{{- end -}}
{{- $classes | toJson -}}
{{- end -}}

{{/* The path on a server, which may be called share or export: dict "of" what has it "key"
what that is called. */}}
{{- define "trivet.share" -}}
{{- if and .of.share .of.export (ne .of.share .of.export) -}}
{{- fail (printf "\n\n%s: share %s and export %s name the same path: remove one" .key .of.share .of.export) -}}
{{- end -}}
{{- .of.share | default .of.export | default "" -}}
{{- end -}}

{{/* Parameters of a StorageClass of the list above. */}}
{{- define "trivet.classParameters" -}}
{{- $p := dict "backend" .backend -}}
{{- if .pool }}{{ $p = set $p "pool" .pool }}{{ else }}{{ $p = merge $p (pick . "server" "share") }}{{ end -}}
{{- if eq .backend "loop" -}}
{{- $p = merge $p (dict "csi.storage.k8s.io/fstype" (.fsType | default "ext4") "allocation" (.allocation | default "thin")) -}}
{{- end -}}
{{- if and (eq .backend "disk") .fsType -}}{{- $p = set $p "csi.storage.k8s.io/fstype" .fsType -}}{{- end -}}
{{- merge $p (.parameters | default dict) | toYaml -}}
{{- end -}}

{{/* When a claim is bound: what every node reaches need not wait for a pod. */}}
{{- define "trivet.bindingMode" -}}
{{- .volumeBindingMode | default (ternary "Immediate" "WaitForFirstConsumer" .shared) -}}
{{- end -}}
