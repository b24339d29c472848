{{/*
What the operator may in the namespaces of jobs: what it does, verb by verb. No Secret, no log of a pod, no shell in one.
What a job owns goes with it, by the garbage collector's hand.
*/}}
{{- define "rlightning.operatorRules" -}}
- apiGroups: [rlightning.io]
  resources: [rljobs]
  verbs: [get, list, watch, delete]  # delete: ttlSecondsAfterFinished
- apiGroups: [rlightning.io]
  resources: [rljobs/status]
  verbs: [get, patch]
- apiGroups: [rlightning.io]
  resources: [policygroups]
  verbs: [get, list, watch, create, patch]
# Drivers report into it; the operator grants that to each, and may grant only what it has.
- apiGroups: [rlightning.io]
  resources: [policygroups/status]
  verbs: [get, patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods, persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles]
  verbs: [get, list, watch, create, patch]  # patch: those of an older operator
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  {{- if .Values.jobs.networkPolicies }}
  verbs: [get, list, watch, create, patch, delete]
  {{- else }}
  verbs: [get, list, watch, delete]  # those of running jobs go
  {{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end }}

{{/* What the status service reads, after it has asked whether the caller may. */}}
{{- define "rlightning.statusRules" -}}
- apiGroups: [rlightning.io]
  resources: [rljobs]
  verbs: [get, list]
- apiGroups: [rlightning.io]
  resources: [policygroups]
  verbs: [get]
{{- end }}

{{/*
Rules bound to an account: a ClusterRole, or a Role in each watched namespace.
Call with (dict "root" . "component" … "account" … "rules" …).
*/}}
{{- define "rlightning.bound" -}}
{{- $root := .root }}
{{- $name := printf "%s-%s" (include "rlightning.fullname" $root) .component }}
{{- if $root.Values.watchNamespaces }}
{{- /* Two releases may watch different namespaces; in one namespace their Roles must not meet. */}}
{{- $name = printf "%s-%s" (include "rlightning.clusterName" $root) .component }}
{{- range $namespace := $root.Values.watchNamespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels:
    {{- include "rlightning.labels" $ | nindent 4 }}
rules:
  {{- $.rules | nindent 2 }}
---
{{ include "rlightning.binding" (dict "kind" "Role" "name" $name "namespace" $namespace "of" $) }}
{{- end }}
{{- else }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels:
    {{- include "rlightning.labels" . | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
{{ include "rlightning.binding" (dict "kind" "ClusterRole" "name" $name "namespace" "" "of" .) }}
{{- end }}
{{- end }}

{{/* The binding of one role of either kind, of the same name. */}}
{{- define "rlightning.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "rlightning.labels" .of | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name }}
subjects:
- kind: ServiceAccount
  name: {{ .of.account }}
  namespace: {{ .of.root.Release.Namespace }}
{{- end }}
