{{/* Checks that the schema cannot express. Each message contains the value and the remedy. */}}

{{/* The minimum versions of the sidecars, with which the flags and rights were tested. */}}
{{- define "trivet.minimumVersions" -}}
provisioner: 6.3.0
attacher: 4.12.0
resizer: 2.2.0
snapshotter: 8.6.0
snapshotMetadata: 1.1.0
registrar: 2.9.0
livenessProbe: 2.8.0
{{- end -}}

{{- define "trivet.check" -}}
{{- $schema := .Files.Get "files/schema.json" | fromJson -}}
{{- include "trivet.checkKeys" (dict "definitions" $schema.definitions "schema" $schema "value" .Values "path" "") -}}
{{- include "trivet.checkSidecars" . -}}
{{- include "trivet.checkPools" . -}}
{{- include "trivet.checkClasses" . -}}
{{- include "trivet.checkEphemeral" . -}}
{{- include "trivet.checkSnapshots" . -}}
{{- include "trivet.checkProtection" . -}}
{{- include "trivet.checkAPIs" . -}}
{{- include "trivet.checkCertificates" . -}}
{{- include "trivet.checkAccounts" . -}}
{{- include "trivet.checkNodeLoss" . -}}
{{- include "trivet.checkCluster" . -}}
{{- if eq .Values.shape "oneNode" -}}{{- include "trivet.checkOneNode" . -}}{{- end -}}
{{- end -}}

{{/* Refuses a list of pools, as in the configuration of the driver, and shows it as a map. */}}
{{- define "trivet.checkPoolMap" -}}
{{- if and (kindIs "slice" .Values.pools) .Values.pools -}}
{{- $map := dict "default" nil -}}
{{- range .Values.pools -}}{{- $_ := set $map (get . "name" | default "NAME") (omit . "name") -}}{{- end -}}
{{- fail (printf "\n\npools is a list, but must be a map by name. The chart adds your pools to its own. Replace your list by:\n\npools:\n%s\n\n(default: null removes the pool default of the chart, which a list would replace)" ($map | toYaml | indent 2)) -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkProtection" -}}
{{- if .Values.protection.enabled -}}
{{- if eq .Values.shape "oneNode" -}}
{{- fail "\n\nprotection.enabled requires shape=cluster, because the copies are on another node" -}}
{{- end -}}
{{- if not .Values.snapshots.enabled -}}
{{- fail "\n\nprotection.enabled requires snapshots.enabled=true" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkCertificates" -}}
{{- if ne .Values.shape "oneNode" -}}
{{- if not (contains "." .Values.driverName) -}}
{{- fail (printf "\n\ndriverName %s: the nodes' certificates require a name with a dot, such as %s.example.com; or set shape=oneNode, which uses no certificates" .Values.driverName .Values.driverName) -}}
{{- end -}}
{{- with .Values.certificates.certManager -}}
{{- if and .enabled (not .issuerRef.name) -}}
{{- fail "\n\ncertificates.certManager.issuerRef.name: set the issuer that signs the CA" -}}
{{- end -}}
{{- if and .enabled (not ($.Capabilities.APIVersions.Has "cert-manager.io/v1")) -}}
{{- fail "\n\ncertificates.certManager: the cluster has no API cert-manager.io/v1. Install cert-manager first, or set certificates.certManager.enabled=false (helm template: --api-versions cert-manager.io/v1)" -}}
{{- end -}}
{{- if and .enabled (ge (.renewBefore | trimSuffix "h" | atoi) (.duration | trimSuffix "h" | atoi)) -}}
{{- fail (printf "\n\ncertificates.certManager.renewBefore %s: must be less than the duration, %s" .renewBefore .duration) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkAccounts" -}}
{{- $account := include "trivet.nodeServiceAccount" . -}}
{{- if and (ne .Values.shape "oneNode") (eq $account (include "trivet.controllerServiceAccount" .)) -}}
{{- fail (printf "\n\nnode.serviceAccount.name and controller.serviceAccount.name are both %s: the nodes could read the key of the CA; give each its own ServiceAccount" $account) -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkNodeLoss" -}}
{{- with .Values.controller.nodeLoss -}}
{{- if and .enabled (eq $.Values.shape "oneNode") -}}
{{- fail "\n\ncontroller.nodeLoss.enabled: shape oneNode has no controller that could release the claims of lost nodes: set it to false, or set shape=cluster" -}}
{{- end -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9.]+[a-z]+" .delay -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit)) -}}
{{- end -}}
{{- if lt $seconds 10.0 -}}
{{- fail (printf "\n\ncontroller.nodeLoss.delay %s: must be at least 10s" .delay) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkSidecars" -}}
{{- range $name, $minimum := include "trivet.minimumVersions" . | fromYaml -}}
{{- $tag := (index $.Values.sidecars $name).tag -}}
{{- if not (semverCompare (printf ">=%s-0" $minimum) $tag) -}}
{{- fail (printf "\n\nsidecars.%s.tag %s is too old: v%s or later is required" $name $tag $minimum) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses a directory that has another use on the node or in the container, or that contains or is
inside such a directory: dict "key" the name of the value "path" the directory "others" a list of
directories with another use. */}}
{{- define "trivet.checkPlace" -}}
{{- range concat .others (list "/bin" "/boot" "/csi" "/dev" "/etc" "/lib" "/lib64" "/proc" "/registration" "/run" "/sbin" "/sys" "/usr" "/var/run") -}}
{{- if or (eq $.path .) (hasPrefix (printf "%s/" .) $.path) -}}
{{- fail (printf "\n\n%s %s: %s has another use; use a directory elsewhere, such as /srv/trivet" $.key $.path .) -}}
{{- end -}}
{{- end -}}
{{- range concat .others (list "/var/lib" "/var/run") -}}
{{- if or (eq $.path .) (hasPrefix (printf "%s/" $.path) .) -}}
{{- fail (printf "\n\n%s %s: the directory is or contains %s; give the driver its own directory below that" $.key $.path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkPools" -}}
{{- $kubeletDir := clean .Values.kubeletDir -}}{{- $stateDir := clean .Values.stateDir -}}
{{- include "trivet.checkPlace" (dict "key" "stateDir" "path" $stateDir "others" (list $kubeletDir)) -}}
{{- $places := dict -}}{{- $servers := dict -}}
{{- $pools := include "trivet.pools" . | fromJsonArray -}}
{{- if not (or $pools (include "trivet.nfs" .) .Values.ephemeral.memory) -}}
{{- fail "\n\npools is empty, so no volume could be created: add a pool, or set nfs.server and nfs.export" -}}
{{- end -}}
{{- if and .Values.nfs.export (not .Values.nfs.server) (not .Values.nfs.storageClasses) -}}
{{- fail (printf "\n\nnfs.server is missing: set the server that exports %s" .Values.nfs.export) -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- $key := printf "pools.%s" $pool.name -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$" $pool.name) -}}
{{- fail (printf "\n\n%s: must be a name of 1 to 40 of a-z, 0-9 and -" $key) -}}
{{- end -}}
{{- if ne 1 (len (compact (list $pool.directory $pool.nfs $pool.disks $pool.lvm))) -}}
{{- fail (printf "\n\n%s: set exactly one of them: directory for a directory on every node, nfs for an export, disks for whole disks of every node, or lvm for a volume group of every node" $key) -}}
{{- end -}}
{{- $at := "directory.path" -}}{{- $place := "" -}}
{{- if $pool.directory -}}
{{- $place = clean $pool.directory.path -}}
{{- else if $pool.disks -}}
{{- $at = "disks" -}}{{- $place = printf "disks of %s" $pool.name -}}
{{- range list "size" "reserve" "overcommit" "freezeLimit" "trim" "trimWindow" "trimBytesPerSecond" "check" "checkWindow" "backgroundBytesPerSecond" "requireMount" "quota" -}}
{{- if hasKey $pool . -}}
{{- fail (printf "\n\n%s.%s is not for pools of disks, because each volume is one whole disk: remove it" $key .) -}}
{{- end -}}
{{- end -}}
{{- else if $pool.lvm -}}
{{- $at = "lvm" -}}{{- $place = printf "volume group of %s" $pool.name -}}
{{- range list "requireMount" "quota" -}}
{{- if hasKey $pool . -}}
{{- fail (printf "\n\n%s.%s is not for pools of volume groups: remove it" $key .) -}}
{{- end -}}
{{- end -}}
{{- if not $pool.lvm.thinPool -}}
{{- range list "size" "reserve" "overcommit" "freezeLimit" "trim" "trimWindow" "trimBytesPerSecond" "check" "checkWindow" -}}
{{- if hasKey $pool . -}}
{{- fail (printf "\n\n%s.%s is not for pools of volume groups without a thin pool, whose capacity is their free extents: remove it" $key .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $at = "nfs.export" -}}
{{- if not $pool.nfs.export -}}
{{- fail (printf "\n\n%s.nfs.export is missing: give the path that the server exports" $key) -}}
{{- end -}}
{{- $place = printf "%s:%s" ($pool.nfs.server | lower | trimPrefix "[" | trimSuffix "]") (clean $pool.nfs.export) -}}
{{- if $pool.requireMount -}}
{{- fail (printf "\n\n%s.requireMount is only for pools with a directory, because an export is always mounted: remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $places $place -}}
{{- fail (printf "\n\n%s.%s %s: pool %s already has that location" $key $at $place (get $places $place)) -}}
{{- end -}}
{{- if $pool.directory -}}{{- include "trivet.checkDirectory" (dict "root" $ "pool" $pool "key" $key) -}}{{- end -}}
{{- range $other, $name := $places -}}
{{- $around := hasPrefix (printf "%s/" (trimSuffix "/" $place)) $other -}}
{{- if or $around (hasPrefix (printf "%s/" (trimSuffix "/" $other)) $place) -}}
{{- fail (printf "\n\n%s.%s %s: pool %s is inside pool %s; give each pool a directory outside all other pools" $key $at $place (ternary $name $pool.name $around) (ternary $pool.name $name $around)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $places $place $pool.name -}}
{{- with $pool.nfs -}}
{{- $server := .server | lower | trimPrefix "[" | trimSuffix "]" -}}
{{- with get $servers $server -}}
{{- if not (and .size $pool.size) -}}
{{- fail (printf "\n\n%s.size: pools %s and %s are exports of server %s, and a driver cannot detect whether they are on one filesystem; give both a size whose sum does not exceed that filesystem" $key .name $pool.name $server) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $servers $server $pool -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks a directory pool: dict "root" $ "pool" the pool "key" the path of the pool in the values. */}}
{{- define "trivet.checkDirectory" -}}
{{- $path := clean .pool.directory.path -}}
{{- $stateDir := clean .root.Values.stateDir -}}
{{- $key := printf "%s.directory.path" .key -}}
{{- include "trivet.checkPlace" (dict "key" $key "path" $path "others" (list (clean .root.Values.kubeletDir))) -}}
{{- if or (eq $path $stateDir) (hasPrefix (printf "%s/" $path) $stateDir) -}}
{{- fail (printf "\n\n%s %s: the directory is or contains stateDir %s; give the pool its own directory" $key $path $stateDir) -}}
{{- end -}}
{{- if and .pool.requireMount (has $path (include "trivet.poolMounts" .root | fromJsonArray)) -}}
{{- fail (printf "\n\n%s.requireMount: %s is mounted into the container, where it would always be a mount point; mount the disk one level deeper, such as at %s/disk, and set that path" .key $path $path) -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkClasses" -}}
{{- $names := list -}}{{- $defaults := list -}}
{{- range include "trivet.storageClasses" . | fromJsonArray -}}
{{- if has .name $names -}}
{{- fail (printf "\n\npools: two storageClasses are named %s" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if .default -}}{{- $defaults = append $defaults .name -}}{{- end -}}
{{- $class := .name -}}{{- $of := . -}}
{{- if not (or .pool (and .server .export)) -}}
{{- fail (printf "\n\nstorageClass %s: set server and export of the class, or nfs.server and nfs.export for all classes below nfs" $class) -}}
{{- end -}}
{{- if and (eq .backend "nfs") (not .shared) -}}
{{- fail (printf "\n\nstorageClass %s: backend nfs requires a pool with nfs, but %s is a directory of the nodes" $class .pool) -}}
{{- end -}}
{{- if and (eq .backend "nfs") (or .fsType .allocation) -}}
{{- fail (printf "\n\nstorageClass %s: fsType and allocation are for disk images, but with backend nfs a volume is a directory: remove them, or set backend=loop" $class) -}}
{{- end -}}
{{- if and (eq .backend "local") .shared -}}
{{- fail (printf "\n\nstorageClass %s: backend local requires a pool of the nodes: move the class to such a pool, or set backend=nfs" $class) -}}
{{- end -}}
{{- range $key, $m := include "trivet.media" $ | fromJson -}}
{{- if and (eq $of.backend $m.backend) (ne $of.medium $key) -}}
{{- fail (printf "\n\nstorageClass %s: backend %s requires %s: move the class to such a pool, or set another backend" $class $m.backend $m.pool) -}}
{{- end -}}
{{- if and (eq $of.medium $key) (ne $of.backend $m.backend) -}}
{{- fail (printf "\n\nstorageClass %s: %s is %s, which only backend %s can use: remove backend, or move the class to another pool" $class $of.pool $m.pool $m.backend) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .backend "local") .fsType -}}
{{- fail (printf "\n\nstorageClass %s: fsType is for disk images and whole disks, but with backend local in pool %s a volume is a directory: remove it, or set backend=loop" $class .pool) -}}
{{- end -}}
{{- if and (or .medium (eq .backend "local")) .allocation -}}
{{- fail (printf "\n\nstorageClass %s: allocation is for disk images, but with backend %s a volume is not a disk image: remove it, or set backend=loop" $class .backend) -}}
{{- end -}}
{{- range $key, $value := (.parameters | default dict) -}}
{{- if has $key (list "backend" "pool" "server" "share" "export" "allocation" "csi.storage.k8s.io/fstype") -}}
{{- fail (printf "\n\nstorageClass %s: the chart sets parameters.%s: the pool of a class is the pool that contains the class; set backend, fsType and allocation in the class itself, not in parameters; define a class for an export that is not a pool in nfs.storageClasses" $class $key) -}}
{{- end -}}
{{- if and (contains "secret" $key) (not (regexMatch "^csi.storage.k8s.io/node-(stage|expand)-secret-name(space)?$" $key)) -}}
{{- fail (printf "\n\nstorageClass %s: parameters.%s: the driver uses only the node-stage and node-expand secrets of encrypted volumes, and its sidecars have no permission to read others" $class $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (dig "parameters" "encryption" "none" .) "luks2") (not (dig "parameters" "csi.storage.k8s.io/node-stage-secret-name" "" .)) -}}
{{- fail (printf "\n\nstorageClass %s: parameters.encryption=luks2 requires parameters csi.storage.k8s.io/node-stage-secret-name and csi.storage.k8s.io/node-stage-secret-namespace" $class) -}}
{{- end -}}
{{- end -}}
{{- if gt (len $defaults) 1 -}}
{{- fail (printf "\n\npools: the storageClasses %s are all default; only one may be default for claims without a class" (join ", " $defaults)) -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkEphemeral" -}}
{{- $open := list -}}
{{- range $pool := include "trivet.pools" . | fromJsonArray -}}
{{- if $pool.ephemeral -}}
{{- if not (or $pool.directory $pool.lvm) -}}
{{- fail (printf "\n\npools.%s.ephemeral is only for pools with a directory or a volume group, because inline volumes are on the node of their pod: remove it" $pool.name) -}}
{{- end -}}
{{- $open = append $open $pool.name -}}
{{- end -}}
{{- end -}}
{{- with .Values.ephemeral -}}
{{- if and .enabled (not $open) (not .memory) -}}
{{- fail "\n\nephemeral.enabled: no inline volume could be created: set ephemeral=true for a pool, or ephemeral.memory" -}}
{{- end -}}
{{- if and (not .enabled) (or $open .memory) -}}
{{- fail (printf "\n\nephemeral.enabled is false, so no inline volume could be created in %s: set ephemeral.enabled=true, or disable inline volumes there" (append $open (ternary "memory" "" (not (empty .memory))) | compact | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkSnapshots" -}}
{{- $names := list -}}{{- $defaults := list -}}
{{- range .Values.snapshots.classes -}}
{{- if has .name $names -}}
{{- fail (printf "\n\nsnapshots.classes: two are named %s" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if .default -}}{{- $defaults = append $defaults .name -}}{{- end -}}
{{- end -}}
{{- if gt (len $defaults) 1 -}}
{{- fail (printf "\n\nsnapshots.classes: %s are all default; only one may be default for snapshots without a class" (join ", " $defaults)) -}}
{{- end -}}
{{- with .Values.snapshots -}}
{{- if and (or .groups .metadata.enabled) (not .enabled) -}}
{{- fail (printf "\n\nsnapshots.%s requires snapshots.enabled=true" (ternary "groups" "metadata.enabled" .groups)) -}}
{{- end -}}
{{- range $key := list "secretName" "caCert" -}}
{{- if and $.Values.snapshots.metadata.enabled (not (index $.Values.snapshots.metadata $key)) -}}
{{- fail (printf "\n\nsnapshots.metadata.%s: backup programs connect by TLS to %s-snapshot-metadata.%s: create a Secret with its certificate, and set both secretName and caCert" $key (include "trivet.fullname" $) $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trivet.checkAPIs" -}}
{{- if and .Values.snapshots.enabled (not (.Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1")) -}}
{{- fail "\n\nsnapshots.enabled: the cluster has no API snapshot.storage.k8s.io/v1. Install the CRDs and the snapshot-controller of https://github.com/kubernetes-csi/external-snapshotter first (docs/snapshots.md), or set snapshots.enabled=false (helm template: --api-versions snapshot.storage.k8s.io/v1)" -}}
{{- end -}}
{{- if and .Values.snapshots.groups (not (.Capabilities.APIVersions.Has "groupsnapshot.storage.k8s.io/v1")) -}}
{{- fail "\n\nsnapshots.groups: the cluster has no API groupsnapshot.storage.k8s.io/v1. Install the CRDs of https://github.com/kubernetes-csi/external-snapshotter, 8.6 or later, first (docs/snapshots.md), or set snapshots.groups=false (helm template: --api-versions groupsnapshot.storage.k8s.io/v1)" -}}
{{- end -}}
{{- if and .Values.snapshots.metadata.enabled (not (.Capabilities.APIVersions.Has "cbt.storage.k8s.io/v1beta1")) -}}
{{- fail "\n\nsnapshots.metadata: the cluster has no API cbt.storage.k8s.io/v1beta1. Install the CRD of https://github.com/kubernetes-csi/external-snapshot-metadata first, or set snapshots.metadata.enabled=false (helm template: --api-versions cbt.storage.k8s.io/v1beta1)" -}}
{{- end -}}
{{- if and (or .Values.metrics.serviceMonitor.enabled .Values.metrics.prometheusRule.enabled) (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "\n\nmetrics.serviceMonitor, metrics.prometheusRule: the cluster has no API monitoring.coreos.com/v1. Install the Prometheus operator first, or set both to enabled=false (helm template: --api-versions monitoring.coreos.com/v1)" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.service) -}}
{{- fail "\n\nmetrics.serviceMonitor.enabled requires metrics.service=true" -}}
{{- end -}}
{{- $ports := list (int .Values.ports.metrics) (int .Values.ports.health) (int .Values.ports.registrar) -}}
{{- if ne .Values.shape "oneNode" -}}{{- $ports = append $ports (int .Values.ports.forwarding) -}}{{- end -}}
{{- if .Values.snapshots.metadata.enabled -}}{{- $ports = append $ports (int .Values.ports.snapshotMetadata) -}}{{- end -}}
{{- if include "trivet.controllerOnHost" . -}}{{- $ports = append (append $ports (int .Values.ports.controllerMetrics)) (int .Values.ports.controllerHealth) -}}{{- end -}}
{{- if ne (len (uniq $ports)) (len $ports) -}}
{{- fail "\n\nports.metrics, ports.health, ports.registrar, ports.forwarding, ports.snapshotMetadata, and with nfs.kerberos ports.controllerMetrics and ports.controllerHealth, must be different" -}}
{{- end -}}
{{- end -}}

{{/* Checks objects that exist in the cluster. `helm template` finds none. */}}
{{- define "trivet.checkCluster" -}}
{{- include "trivet.checkDropped" . -}}
{{- /* A volume that was attached has a finalizer that only csi-attacher removes, so the volume could
never be deleted without that sidecar. */ -}}
{{- if not .Values.attachRequired -}}
{{- $held := list -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- if and (eq (dig "spec" "csi" "driver" "" .) $.Values.driverName) (contains "external-attacher/" (dig "metadata" "finalizers" list . | join " ")) -}}
{{- $held = append $held .metadata.name -}}
{{- end -}}
{{- end -}}
{{- with $held -}}
{{- fail (printf "\n\nattachRequired: %d volumes were attached by csi-attacher and cannot be deleted without it, such as %s. Delete their claims first, or keep attachRequired=true" (len .) (first .)) -}}
{{- end -}}
{{- end -}}
{{- with lookup "storage.k8s.io/v1" "CSIDriver" "" .Values.driverName -}}
{{- $modes := .spec.volumeLifecycleModes | default (list "Persistent") -}}
{{- if ne (has "Ephemeral" $modes) $.Values.ephemeral.enabled -}}
{{- fail (printf "\n\nephemeral.enabled: CSIDriver %s has volumeLifecycleModes [%s] and Kubernetes does not allow changes to them. Delete the object while no pod with such a volume starts or stops, then repeat this command; volumes and data stay:\n  kubectl delete csidriver %s" $.Values.driverName (join ", " $modes) $.Values.driverName) -}}
{{- end -}}
{{- if ne .spec.attachRequired $.Values.attachRequired -}}
{{- fail (printf "\n\nattachRequired: CSIDriver %s has %t and Kubernetes does not allow changes to it. Delete the object while no pod with such a volume starts or stops, then repeat this command; volumes and data stay:\n  kubectl delete csidriver %s" $.Values.driverName .spec.attachRequired $.Values.driverName) -}}
{{- end -}}
{{- end -}}
{{- range include "trivet.storageClasses" . | fromJsonArray -}}
{{- $wanted := . -}}
{{- with lookup "storage.k8s.io/v1" "StorageClass" "" .name -}}
{{- $same := and (eq .provisioner $.Values.driverName)
  (eq (.parameters | toJson) (include "trivet.classParameters" $wanted | fromYaml | toJson))
  (eq .reclaimPolicy ($wanted.reclaimPolicy | default "Delete"))
  (eq .volumeBindingMode (include "trivet.bindingMode" $wanted)) -}}
{{- if not $same -}}
{{- fail (printf "\n\nstorageClass %s exists with other parameters, reclaimPolicy or volumeBindingMode, and Kubernetes does not allow changes to them. Use another name, or delete it and repeat this command; its volumes are not changed:\n  kubectl delete storageclass %s" $wanted.name $wanted.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with lookup "v1" "Namespace" "" .Release.Namespace -}}
{{- $level := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" . -}}
{{- if and $level (ne $level "privileged") -}}
{{- fail (printf "\n\nnamespace %s enforces the Pod Security level %s, but the driver's pods must be privileged:\n  kubectl label --overwrite namespace %s pod-security.kubernetes.io/enforce=privileged" $.Release.Namespace $level $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses to remove a pool that has PersistentVolumes or VolumeSnapshotContents. An ID is backend:pool.uuid:name, or
backend:pool:name for an export. Other IDs contain no pool of the values. */}}
{{- define "trivet.checkDropped" -}}
{{- $names := list -}}
{{- range include "trivet.pools" . | fromJsonArray }}{{ $names = append $names .name }}{{ end -}}
{{- $ids := dict -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- /* A volume with the attribute server has an ID of any form. */ -}}
{{- $attributes := keys (dig "spec" "csi" "volumeAttributes" dict .) | join " " | lower | splitList " " -}}
{{- if and (eq (dig "spec" "csi" "driver" "" .) $.Values.driverName) (not (has "server" $attributes)) -}}
{{- $_ := set $ids (dig "spec" "csi" "volumeHandle" "" .) (printf "PersistentVolume %s" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- if .Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1" -}}
{{- range (lookup "snapshot.storage.k8s.io/v1" "VolumeSnapshotContent" "" "").items -}}
{{- if eq .spec.driver $.Values.driverName -}}
{{- $_ := set $ids (dig "status" "snapshotHandle" "" .) (printf "VolumeSnapshotContent %s" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $id, $object := $ids -}}
{{- $pool := regexFind "^[a-z]+:[a-z0-9-]+(\\.[0-9a-f]{8})?:[a-z0-9.-]+$" $id | splitList ":" | rest | first | default "" | splitList "." | first -}}
{{- if and $pool (not (has $pool $names)) -}}
{{- fail (printf "\n\npools.%s is missing, but %s is in that pool: pods could no longer use it. Add the pool again, or first delete its claims and snapshots, and what `kubectl trivet orphans` lists. To delete a released volume with the reclaim policy Retain:\n  kubectl patch pv NAME -p '{\"spec\":{\"persistentVolumeReclaimPolicy\":\"Delete\"}}'" $pool $object) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* With shape oneNode, refuses volumes on several nodes and a selector that several nodes match. */}}
{{- define "trivet.checkOneNode" -}}
{{- $places := list -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- if eq (dig "spec" "csi" "driver" "" .) $.Values.driverName -}}
{{- range dig "spec" "nodeAffinity" "required" "nodeSelectorTerms" list . -}}
{{- range .matchExpressions -}}
{{- if eq .key "csi.trivet.dev/node" -}}{{- $places = concat $places .values -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $places = sortAlpha (uniq $places) -}}
{{- if gt (len $places) 1 -}}
{{- fail (printf "\n\nshape: volumes are on %d nodes (%s), but oneNode serves one of them. Keep shape=cluster, or delete the claims of the other nodes first" (len $places) (join ", " $places)) -}}
{{- end -}}
{{- if not .Values.node.affinity -}}
{{- $fit := list -}}
{{- range (lookup "v1" "Node" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $fits := true -}}
{{- range $key, $value := include "trivet.linux" $.Values.node.nodeSelector | fromYaml -}}
{{- if ne (get $labels $key) $value -}}{{- $fits = false -}}{{- end -}}
{{- end -}}
{{- if $fits -}}{{- $fit = append $fit (get $labels "kubernetes.io/hostname" | default (printf "(%s has no such label)" .metadata.name)) -}}{{- end -}}
{{- end -}}
{{- if gt (len $fit) 1 -}}
{{- $option := "\n  --set node.nodeSelector.kubernetes\\\\.io/hostname=" -}}
{{- fail (printf "\n\nnode.nodeSelector: %d nodes match, but shape oneNode serves one. Set shape=cluster, or select the node that has the pools (if the driver already runs: kubectl -n %s get pod -o wide) with one of:%s%s" (len $fit) .Release.Namespace $option (join $option $fit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
